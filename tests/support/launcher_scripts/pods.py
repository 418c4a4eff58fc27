"""Runs a command twice, as an operator of Kubernetes does in two pods: with the variables of each.

python pods.py NAME=VALUE... -- COMMAND...

In values, {pod} is the number of the pod.
"""

import os
import subprocess
import sys

split = sys.argv.index("--")
variables, command = [pair.partition("=") for pair in sys.argv[1:split]], sys.argv[split + 1 :]
pods = [
    subprocess.Popen(command, env=os.environ | {name: value.format(pod=pod) for name, _, value in variables})
    for pod in range(2)
]
codes: list[int] = []
while len(codes) < len(pods):
    try:
        codes.append(pods[len(codes)].wait())
    except KeyboardInterrupt:
        continue  # it reaches the pods too, which end by themselves
sys.exit(max(abs(code) for code in codes))
