"""The description of a cluster, and what is wrong with a bad one, in one line."""

import math

import pytest

from paceline.errors import OptionError
from paceline.tools.plan.cluster import Cluster, parse_hooks, parse_hosts, parse_latency, parse_link


@pytest.mark.parametrize(
    ("text", "bits"), [("10Gbit", 1e10), ("100mbit", 1e8), ("1.5 kbit", 1500.0), ("7bit", 7.0)]
)
def test_a_link_is_a_number_of_bits_per_second(text: str, bits: float) -> None:
    assert parse_link(text) == pytest.approx(bits)


@pytest.mark.parametrize(("text", "seconds"), [("50us", 5e-5), ("2ms", 2e-3), ("1s", 1.0)])
def test_a_latency_is_a_number_of_seconds(text: str, seconds: float) -> None:
    assert parse_latency(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["10parsec", "10", "Gbit", "-1Gbit", "10Gbyte", ""])
def test_a_link_without_a_known_unit_is_refused(text: str) -> None:
    with pytest.raises(OptionError) as error:
        parse_link(text)
    assert str(error.value) == (
        f"a link must be a number with a unit, such as 10Gbit (link: {text}; "
        "units: bit, kbit, Mbit, Gbit, Tbit)"
    )


def test_hosts_are_sorted_and_counted_once() -> None:
    assert parse_hosts("64,2,8,2") == (2, 8, 64)


def test_hosts_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(OptionError, match=r"hosts must be whole numbers .* \(hosts: 2,many\)"):
        parse_hosts("2,many")


def test_hooks_come_in_the_order_from_exact_to_coarse() -> None:
    assert parse_hooks("outer,int8,none") == ("none", "int8", "outer")


def test_an_unknown_hook_is_refused() -> None:
    with pytest.raises(OptionError, match=r"does not know this hook \(hook: int3; known: none, fp16"):
        parse_hooks("none,int3")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hosts": (0, 2)}, r"one host or more \(hosts: 0,2\)"),
        ({"ranks_per_host": 0}, r"one rank or more \(ranks per host: 0\)"),
        ({"cores_per_host": 0}, r"one core or more \(cores per host: 0\)"),
        ({"hosts": (2, 10**30)}, r"10,000 hosts at most \(hosts: 2,10+\)"),
        ({"ranks_per_host": 10**9}, r"1,000 ranks at most \(ranks per host: 10+\)"),
        ({"cores_per_host": 10**400}, r"10,000 cores at most \(cores per host: 10+\)"),
        ({"link": 0.0}, r"a rate of 1 bit/s to .* \(link: 0 bit/s\)"),
        ({"link": math.inf}, r"to 1,000,000 Tbit/s \(link: inf bit/s\)"),
        ({"latency": math.inf}, r"an hour at most \(latency: inf s\)"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(change: dict[str, object], words: str) -> None:
    given = {"hosts": (2,), "ranks_per_host": 2, "link": 1e9, "latency": 0.0, **change}
    with pytest.raises(OptionError, match=words):
        Cluster(**given)  # type: ignore[arg-type]
