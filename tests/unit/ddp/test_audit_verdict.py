"""Which of several ranks is alone."""

from paceline.ddp.audit.verdict import RankView, What, describe_differences, find_differences


def views(*hashes: int, layout: bytes = b"") -> list[RankView]:
    return [RankView(0, layout, tensors={"w": each, "same": 1}) for each in hashes]


def told(found: list[RankView], ranks: list[int] | None = None) -> list[str]:
    differences = find_differences(found)
    return describe_differences(
        differences, since=lambda _: "since steps 3 to 19", global_ranks=ranks or [*range(len(found))]
    )


def test_equal_ranks_do_not_differ() -> None:
    assert find_differences(views(5, 5, 5)) == []


def test_of_three_ranks_one_is_alone() -> None:
    (found,) = find_differences(views(5, 7, 5))
    assert (found.name, found.majority, found.alone) == ("w", [0, 2], [1])
    assert told(views(5, 7, 5)) == ["w differs on rank 1 alone; ranks 0, 2 agree (since steps 3 to 19)"]


def test_ranks_are_told_by_their_numbers_in_the_default_group() -> None:
    assert "differs on rank 6 alone; ranks 4, 8 agree" in told(views(5, 7, 5), [4, 6, 8])[0]


def test_two_ranks_and_two_halves_have_no_culprit() -> None:
    for hashes in [(5, 7), (5, 5, 7, 7), (1, 2, 3)]:
        (found,) = find_differences(views(*hashes))
        assert (found.majority, found.alone) == ([], [])
        assert "no value is that of most ranks (hash " in told(views(*hashes))[0]


def test_tensors_of_other_layouts_are_not_compared() -> None:
    assert find_differences([*views(5, layout=b"a"), *views(7, layout=b"b")]) == []


def test_options_are_told_with_their_values() -> None:
    found = [RankView(0, b"", options={"lr of optimizer group 0": each}) for each in (0.1, 0.1, 0.2)]
    assert told(found) == [
        "lr of optimizer group 0 is 0.1 on ranks 0, 1; 0.2 on rank 2 (since steps 3 to 19)"
    ]


def test_options_that_one_rank_does_not_have_are_not_compared() -> None:
    assert find_differences([RankView(0, b"", options={"lr": 1.0}), RankView(0, b"")]) == []


def test_buffers_name_the_ranks_on_which_they_changed() -> None:
    found = [RankView(0, b"", changed=frozenset(each)) for each in (["mean"], [])]
    (difference,) = find_differences(found)
    assert difference.what is What.BUFFER
    assert "mean changed between two forwards on rank 0, and not on rank 1" in told(found)[0]
    assert find_differences([found[0], found[0]]) == []


def test_many_names_are_told_in_one_sentence() -> None:
    found = [RankView(0, b"", tensors={f"p{at}": at + each for at in range(9)}) for each in (0, 0, 1)]
    (sentence,) = told(found)
    assert sentence.startswith("p0, p1, p2, p3 and 5 more differs on rank 2 alone")
