"""All pieces of ``make gpu``, in the order of what they tell in a second: where time ends, the least is lost.

Limits are several times what a piece should take on a GPU of the class that this is made for.
"""

from __future__ import annotations

from bench.gpu.answers import answers_stage
from bench.gpu.kernels import HEADS, equal_stage, kernel_stage
from bench.gpu.machine import info_stage, suite_stage
from bench.gpu.pace import FUSED_ROWS, choose_stage, decode_stage, fp8_stage, fused_stage, graphs_stage, tree_stage
from bench.gpu.piece import Piece
from bench.gpu.profile import profile_stage
from bench.gpu.served import served_stage

SERVED = ("1", "8", "32", "64")  # sessions

PIECES = (
    Piece("info", info_stage, 30.0),
    Piece("kernel", kernel_stage, 30.0, HEADS[0]),
    Piece("equal", equal_stage, 45.0),
    *(Piece("profile", profile_stage, 45.0, sessions) for sessions in ("1", "64")),
    Piece("graphs", graphs_stage, 60.0),
    *(Piece("fused", fused_stage, 30.0, str(rows)) for rows in FUSED_ROWS),
    Piece("choose", choose_stage, 30.0),
    Piece("tree", tree_stage, 45.0),
    Piece("fp8", fp8_stage, 60.0),
    *(Piece("served", served_stage, 60.0, sessions) for sessions in SERVED),
    Piece("answers", answers_stage, 90.0),
    *(Piece("kernel", kernel_stage, 30.0, heads) for heads in HEADS[1:]),
    Piece("decode", decode_stage, 60.0),
    Piece("suite", suite_stage, 300.0),
)
STAGES = tuple(dict.fromkeys(piece.stage for piece in PIECES))
