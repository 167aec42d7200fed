"""All jobs of ``make gpu``. Those that show most in a second come first: if time runs out, the least is lost.

A limit is several times what the job should take on a GPU of the class that this is made for.
"""

from __future__ import annotations

from bench.gpu.job import Job

HEADS = ("128x4", "128x8", "128x1", "64x3", "64x7")  # numbers of a head x query heads of a KV head
SESSIONS = ("1", "8", "64")

JOBS = (
    Job("info", "bench.gpu.machine:info_stage", 30.0),
    Job("kernel", "bench.gpu.machine:kernel_stage", 30.0, HEADS[0]),
    Job("equal", "bench.gpu.machine:equal_stage", 45.0),
    *(Job("profile", "bench.gpu.profile:profile_stage", 45.0, sessions) for sessions in (SESSIONS[0], SESSIONS[-1])),
    Job("graphs", "bench.gpu.pace:graphs_stage", 60.0),
    Job("choose", "bench.gpu.pace:choose_stage", 60.0),
    Job("tree", "bench.gpu.pace:tree_stage", 60.0),
    Job("fp8", "bench.gpu.pace:fp8_stage", 60.0),
    Job("suite", "bench.gpu.machine:suite_stage", 300.0),
    *(Job("served", "bench.gpu.served:served_stage", 120.0, sessions) for sessions in SESSIONS),
    Job("answers", "bench.gpu.answers:answers_stage", 90.0),
    *(Job("kernel", "bench.gpu.machine:kernel_stage", 30.0, heads) for heads in HEADS[1:]),
)
STAGES = tuple(dict.fromkeys(job.stage for job in JOBS))
