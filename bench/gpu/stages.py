"""All pieces of ``make gpu``, in the order of what they tell in a second: where time ends, the least is lost.

Limits are several times what a piece should take on a GPU of the class that this is made for.
"""

from __future__ import annotations

from bench.gpu.piece import Piece

HEADS = ("128x4", "128x8", "128x1", "64x3", "64x7")  # numbers of a head x query heads of a KV head
SESSIONS = ("1", "8", "64")
ROWS = ("1", "9", "64")

PIECES = (
    Piece("info", "bench.gpu.machine:info_stage", 30.0),
    Piece("kernel", "bench.gpu.machine:kernel_stage", 30.0, HEADS[0]),
    Piece("equal", "bench.gpu.machine:equal_stage", 45.0),
    *(Piece("profile", "bench.gpu.profile:profile_stage", 45.0, sessions) for sessions in (SESSIONS[0], SESSIONS[-1])),
    Piece("graphs", "bench.gpu.pace:graphs_stage", 60.0),
    *(Piece("fused", "bench.gpu.pace:fused_stage", 30.0, rows) for rows in ROWS),
    Piece("choose", "bench.gpu.pace:choose_stage", 60.0),
    Piece("tree", "bench.gpu.pace:tree_stage", 60.0),
    Piece("fp8", "bench.gpu.pace:fp8_stage", 60.0),
    Piece("suite", "bench.gpu.machine:suite_stage", 300.0),
    *(Piece("served", "bench.gpu.served:served_stage", 120.0, sessions) for sessions in SESSIONS),
    Piece("answers", "bench.gpu.answers:answers_stage", 90.0),
    *(Piece("kernel", "bench.gpu.machine:kernel_stage", 30.0, heads) for heads in HEADS[1:]),
    Piece("decode", "bench.gpu.pace:decode_stage", 60.0),
)
STAGES = tuple(dict.fromkeys(piece.stage for piece in PIECES))
