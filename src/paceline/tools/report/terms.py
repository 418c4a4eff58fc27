"""What the words on the page mean. The page shows them as tooltips; docs/report.md has the same list."""

from collections.abc import Mapping

from paceline.tools.report.step_parts import StepPart

_PARTS: Mapping[StepPart, str] = {
    StepPart.ACCUMULATION: "earlier forwards (and backwards) of the same step, under no_sync or before one "
    "backward over several forwards, with what is between them and has no other name",
    StepPart.BUFFERS: "ranks get rank 0's module buffers, such as the running averages of BatchNorm, before "
    "forward; a rank that is early waits here",
    StepPart.FORWARD: "the module's forward",
    StepPart.LOSS: "from the end of forward until the first gradient reaches the module's outputs",
    StepPart.BACKWARD: "from the first gradient to the last one on this rank; full buckets are averaged "
    "meanwhile",
    StepPart.WAITING: "backward has ended on this rank, and still runs on another one",
    StepPart.EXPOSED_COMMUNICATION: "backward has ended on all ranks, and the last bucket is not averaged "
    "yet: nothing hides this time",
    StepPart.GRAD_ASSIGNMENT: "the averages become the parameters' .grad",
    StepPart.BEFORE_OPTIMIZER: "from averaged gradients to the optimizer's step, and between optimizers: "
    "clipping, for example",
    StepPart.OPTIMIZER: "the optimizer's step, without the forward and backward that a closure calls",
    StepPart.DATA: "what is left before the next forward; without a DataLoader also data, schedulers and "
    "logging",
    StepPart.JOIN: "under join, ranks tell each other at the start of forward who has inputs; those without "
    "wait until the join ends",
    StepPart.AFTER_OPTIMIZER: "until a DataLoader is asked for a batch: schedulers and logging, for example",
    StepPart.LOADER: "waiting for a batch of torch's DataLoader, or for its workers to start, in the "
    "thread that calls forward",
    StepPart.OTHER_WRAPPERS: "forward, backward and optimizer of other wrappers, between the parts of this "
    "one; in a backward that several share, what follows this one's last bucket",
    StepPart.EVALUATION: "the wrapper's forward under torch.no_grad: evaluation, or inputs of another module",
    StepPart.SAVING: "torch's function, in the thread that calls forward: saving a checkpoint, for example",
    StepPart.PAUSE: "time outside of forward, backward and optimizer that exceeds the usual by more than a "
    "whole step, and as long waits of a step that was lost",
}

# By what the page calls them, in lower case.
TERMS: Mapping[str, str] = {
    "usual step": "the mean of the steps, without pauses; the other parts of a step add up to it",
    "wall time": "from the begin of a rank's first recorded step to the end of its last one; parts and "
    "pauses add up to it",
    "steps per second": "steps per second of the wall time, with pauses",
    **{str(part).lower(): meaning for part, meaning in _PARTS.items()},
    "communication overlap": "the share of the time in which a bucket is in flight that is during backward; "
    "it is hidden, because the rank computes meanwhile",
    "in flight": "of a bucket: launched, and not reduced yet",
    "per second": "what ddp.recorder.count has counted on all ranks together, by default samples",
    "steps": "backward passes that average gradients; a lost step ended without averages, because a rank "
    "raised an error, ended or stopped",
    "straggler": "a rank that the others wait for in most steps, because of what it does by itself",
    "delay": "how much later than the median of the other ranks a rank comes to this point, where ranks "
    "wait for each other; below zero, it is earlier",
    "came last": "the share of steps in which this rank was the last to come there",
    "suggestions": "changes that the figures support; those that can save most come first",
    "timeline": "what each rank did, step by step, on one clock",
    "healing": "a rank was lost; another process took its place, or the others went on without it",
    "last minute": "what each rank was doing before a run stalled or failed",
    "step time": "from the begin of a step to the begin of the next one",
    "waiting after backward": "from the end of a rank's own backward until the last bucket is reduced: "
    "waiting for the slowest rank, and exposed communication",
    "bucket": "gradients that are averaged together, in one collective; buckets are launched in the order "
    "of their numbers",
    "size": "the bytes of a bucket's gradients",
    "parameters": "how many parameters get a gradient",
    "ready": "of a bucket: its last gradient is computed",
    "launched": "of a bucket: its average begins to be computed",
    "queued": "of a bucket: it is ready, but an earlier bucket must be launched first",
    "reduced": "of a bucket: its average is there",
    "in backward": "the bucket's times as a picture; backward is shaded",
    "waits for": "the parameter whose gradient makes the bucket ready; then the bucket that it is queued "
    "behind",
    "host": "the name of the machine",
    "longest step": "the longest step of the whole run",
    "module": "the class of the wrapped module",
    "ranks": "how many ranks average together, and on how many hosts they are",
    "device": "where the module's parameters are",
    "backend": "the backend of the process group",
    "transport": "how gradients travel: in shared memory between the ranks of one host, or by the backend "
    "(c10d)",
    "averaged by": "the communication hook, or another special way to average; without this line, a plain "
    "all-reduce",
    "bucket caps": "how many bytes a bucket may hold",
    "bucket plans": "which parameters are in which bucket; the first plan has one bucket, and shows in "
    "which order gradients come",
    "clocks": "by how much times of different hosts may be wrong",
    "version of the recording": "the format of its files",
    "ranks without a recording": "ranks of the group that have written nothing",
}
