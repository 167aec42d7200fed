"""The wire's bytes: they never drift, they come back as they went, and the worst they do is a typed error."""

from __future__ import annotations

import tracemalloc
from array import array
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from slipstream.base.config import DraftSection
from slipstream.base.errors import InvalidRequest, ModelChanged, PairingError, RemoteProtocolError, SlipstreamError
from slipstream.protocol.chat import ChatOptions, Delta, Message, PartialAnswer, PromptToken, TextToken, Usage
from slipstream.protocol.grammar import KINDS, MAX_SOURCE, Grammar
from slipstream.protocol.identity import Identity
from slipstream.protocol.messages import (
    FEATURE_DTYPES,
    Close,
    Commit,
    DraftHello,
    Drop,
    Features,
    FeatureSpec,
    Growth,
    Open,
    TargetHello,
)
from slipstream.protocol.requests import (
    MAX_ALLOWED,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_SCORES,
    MAX_STOP_TOKEN_IDS,
    NEEDS,
    DraftStatus,
    Piece,
    PromptScores,
    Request,
    Sampling,
    ServedModel,
    TargetInfo,
    TokenLogprob,
)
from slipstream.protocol.tree import MAX_HELD
from slipstream.v1 import common_pb2, draft_pb2, inference_pb2, target_pb2
from slipstream.wire.answers import (
    MAX_ANSWER_ITEMS,
    RequestContent,
    ResponseContent,
    decode_answer_requests,
    decode_answer_responses,
    decode_info,
    encode_answer_request,
    encode_answer_response,
    encode_info,
)
from slipstream.wire.codec import (
    FrameLimits,
    decode_draft_frame,
    decode_draft_hello,
    decode_target_frame,
    decode_target_hello,
    encode_draft_frames,
    encode_draft_hello,
    encode_target_frames,
    encode_target_hello,
)
from slipstream.wire.inference import (
    decode_chat,
    decode_complete,
    decode_delta,
    decode_models,
    encode_chat,
    encode_complete,
    encode_delta,
    encode_models,
)

VOCAB, CONTEXT, WIDTH = 1000, 500, 3
SERVED = ServedModel("tiny", VOCAB, CONTEXT, "abc", 4096, Identity("", "float32", "none", "cpu"))
LIMITS = FrameLimits(VOCAB, CONTEXT, 63, WIDTH, "bfloat16")
MAX_BYTES = 1 << 20
INCARNATION = 7


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def growth(ids=(1, 2), parents=(-5, 1), tokens=(10, 11), scores=(-0.5, -1.0), base=5, session=3) -> Growth:
    return Growth(session, base, ints(*ids), ints(*parents), ints(*tokens), np.array(scores, np.float32))


def same(left: object, right: object) -> bool:
    """Equal field by field, arrays by value."""
    if type(left) is not type(right):
        return False
    for name in left._fields if isinstance(left, tuple) else left.__dataclass_fields__:
        mine, other = getattr(left, name), getattr(right, name)
        equal = np.array_equal(mine, other) if isinstance(mine, np.ndarray) else mine == other or same(mine, other)
        if not equal:
            return False
    return True


SAMPLING = Sampling(0.5, 40, 0.75, 0.125, 0.5, -0.5, 1.25, ((5, -1.5),), 2, (0, 7), 2**64 - 1)
TARGET_HELLO = TargetHello(1, INCARNATION, "tiny", VOCAB, "abc", 64, 2, CONTEXT)
DRAFT_HELLO = DraftHello(1, INCARNATION, "eagle3", VOCAB, "abc", FeatureSpec((0, 2), 128, "bfloat16"), 64, 256, 63, 16)
FEATURES = Features(3, 4, bytes(range(2 * WIDTH * 2)), 2, "bfloat16")
TARGET_ITEMS = [Open(3, ints(1, 2, 3, 4, 5), 4, SAMPLING, 9), FEATURES,
                Commit(3, 5, ints(6, 7), FEATURES, 5), Close(9)]
DRAFT_ITEMS = [growth(), Growth.empty(4, 6), Drop(5, "capacity", 7)]
REQUEST = Request("r-1", (1, 2, 3), SAMPLING, 16, 0, False)
PIECE = Piece((1, 2), 1, 3, (TokenLogprob(-0.5, ((1, -0.5), (9, -2.0))), TokenLogprob(-1.0)), "stop", 0.25, 0.125,
              "shadow", 8, plain_s=0.5)
INFO = TargetInfo("tiny", VOCAB, CONTEXT, "abc", 1, 2, True, (DraftStatus("d:1", False, "ngram", "vocab"),))
OPTIONS = ChatOptions(8, 0.5, 0.75, 3, 0.25, 0.5, -0.5, 1.25, ((5, -1.5),), 11, ("end",), 2, True, 3, False)
DELTA = Delta("ab", (TextToken(1, "a", True, -0.5), TextToken(2, "b")), "stop", Usage(1, 2, 3, 4, 5, 6))

GOLDEN = {
    "target_hello": "0a2008011107000000000000001a0474696e7920e8072a036162633040380240f403",
    "draft_hello": "0a2f08011107000000000000001a066561676c653320e8072a0361626332090a02000210800118033840408002483f5010",
    "target_frame": (
        "12cd0109070000000000000012760a7408031214010000000200000003000000040000000500000018042256090000000000"
        "00e03f102819000000000000e83f21000000000000c03f29000000000000e03f31000000000000e0bf39000000000000f43f"
        "420b080511000000000000f8bf48025202000758ffffffffffffffffff0128091218121608031004180220032a0c00010203"
        "0405060708090a0b122a1a28080310051a0806000000070000002a1608031004180220032a0c00010203040506070809"
        "0a0b3005120422020809"
    ),
    "draft_frame": (
        "1253090700000000000000122e0a2c080310051a0801000000020000002208fbffffff010000002a080a0000000b00000032"
        "08000000bf000080bf12060a04080410061210120e0805120863617061636974791807"
    ),
    "start": (
        "0a75080312710a03722d31120c0100000002000000030000001a5609000000000000e03f102819000000000000e83f210000"
        "00000000c03f29000000000000e03f31000000000000e0bf39000000000000f43f420b080511000000000000f8bf48025202"
        "000758ffffffffffffffffff01201028003002"
    ),
    "control": "0a0608031a020802",
    "piece": (
        "0a5008031a4c0a08010000000200000010011803221f09000000000000e0bf120201091a10000000000000e0bf0000000000"
        "0000c0220909000000000000f0bf28013090a10f38c8d0074002480860a0c21e"
    ),
    "info": "0a0474696e7910e80718f403220361626328013002480152130a03643a311a056e6772616d2205766f636162",
    "chat": (
        "0a016d120a0a0475736572120268691a56080811000000000000e03f19000000000000e83f200329000000000000d03f3100"
        "0000000000e03f39000000000000e0bf41000000000000f43f4a0b080511000000000000f8bf500b5a03656e646002680170"
        "037800"
    ),
    "complete": (
        "0a016d120268691a56080811000000000000e03f19000000000000e83f200329000000000000d03f31000000000000e03f39"
        "000000000000e0bf41000000000000f43f4a0b080511000000000000f8bf500b5a03656e646002680170037800"
    ),
    "delta": (
        "0a310a02616212100801120161180121000000000000e0bf120508021201621a0473746f70220c0801100218032004280530"
        "06"
    ),
    "models": "0a016d0a016e",
}


def encoded() -> dict[str, bytes]:
    return {
        "target_hello": encode_target_hello(TARGET_HELLO),
        "draft_hello": encode_draft_hello(DRAFT_HELLO),
        "target_frame": encode_target_frames(INCARNATION, TARGET_ITEMS, MAX_BYTES)[0][0],
        "draft_frame": encode_draft_frames(INCARNATION, DRAFT_ITEMS, MAX_BYTES)[0][0],
        "start": encode_answer_request(3, REQUEST),
        "control": encode_answer_request(3, False),
        "piece": encode_answer_response(3, PIECE),
        "info": encode_info(INFO),
        "chat": encode_chat("m", (Message("user", "hi"),), OPTIONS),
        "complete": encode_complete("m", "hi", OPTIONS),
        "delta": encode_delta(DELTA),
        "models": encode_models(["m", "n"]),
    }


def asked(data: bytes) -> list[tuple[int, RequestContent]]:
    """Items of answers; raises the first that is wrong."""
    items = [*decode_answer_requests(data)]
    for _, content in items:
        if isinstance(content, SlipstreamError):
            raise content
    return items


def told(data: bytes) -> list[tuple[int, ResponseContent]]:
    items = decode_answer_responses(data)
    for _, content in items:
        if isinstance(content, SlipstreamError):
            raise content
    return items


@pytest.mark.parametrize("name", encoded())
def test_golden(name: str) -> None:
    assert encoded()[name].hex() == GOLDEN[name]


def test_a_commit_of_a_release_that_told_how_many_were_verified_is_one_without_that() -> None:
    wire = draft_pb2.ExchangeRequest.FromString(encode_target_frames(INCARNATION, TARGET_ITEMS, MAX_BYTES)[0][0])
    wire.frame.items[2].commit.MergeFromString(b"\x20\x04")
    items, faults = decode_target_frame(wire.SerializeToString(), INCARNATION, LIMITS)
    assert not faults and len(items) == 4 and all(map(same, items, TARGET_ITEMS))


def test_a_piece_of_a_release_that_told_how_long_it_was_queued_is_one_without_that() -> None:
    wire = target_pb2.GenerateManyResponse.FromString(encode_answer_response(3, PIECE))
    wire.items[0].piece.MergeFromString(b"\x50\x07")
    assert told(wire.SerializeToString()) == [(3, PIECE)]


def test_hellos_come_back() -> None:
    assert decode_target_hello(encode_target_hello(TARGET_HELLO)) == TARGET_HELLO
    assert decode_draft_hello(encode_draft_hello(DRAFT_HELLO)) == DRAFT_HELLO
    plain = replace(DRAFT_HELLO, features=None, vocab_size=0, tokenizer_hash="", hidden_size=0)
    assert decode_draft_hello(encode_draft_hello(plain)) == plain
    ahead = replace(DRAFT_HELLO, run_ahead=MAX_HELD - 1)
    assert decode_draft_hello(encode_draft_hello(ahead)) == ahead
    with pytest.raises(RemoteProtocolError, match="run_ahead"):
        decode_draft_hello(encode_draft_hello(replace(ahead, run_ahead=MAX_HELD)))
    assert DraftSection(run_ahead=MAX_HELD - 1)
    with pytest.raises(ValidationError):
        DraftSection(run_ahead=MAX_HELD)


def test_requests_and_texts_come_back() -> None:
    for request in (REQUEST, replace(REQUEST, top_logprobs=None), replace(REQUEST, namespace="0a_Z-" * 12),
                    replace(REQUEST, prompt_logprobs=2, max_tokens=0, logprobs_mode="processed",
                            allowed_token_ids=(5, 9), bad_words=((1,), (2, 3))),
                    *(replace(REQUEST, grammar=Grammar(kind, "é{}")) for kind in KINDS)):
        assert asked(encode_answer_request(3, request)) == [(3, request)]
    assert [asked(encode_answer_request(3, mode)) for mode in (True, False)] == [[(3, True)], [(3, False)]]
    assert told(encode_answer_response(3, PIECE)) == [(3, PIECE)]
    scored = Piece((), prompt=PromptScores(1, (-0.5, -9.0), (1, 77), (4, 5, 6, 7), (-0.5, -1.0, -0.1, -3.0)))
    assert told(encode_answer_response(3, scored)) == [(3, scored)]
    assert scored.prompt is not None and scored.prompt.width == 2
    assert decode_info(encode_info(INFO)) == INFO
    assert decode_info(encode_info(replace(INFO, takes=NEEDS))).takes == NEEDS
    more = ChatOptions(echo=True, prompt_logprobs=0, logprobs_mode="tempered", allowed_token_ids=(3, 1),
                       bad_words=("no", "never ever"), max_tokens=0)
    assert decode_complete(encode_complete("m", "hi", more)) == ("m", "hi", more)
    prompt = Delta(prompt=(PromptToken(1, "a"), PromptToken(2, "b", -0.5, 1, ((2, "b", -0.5), (7, "x", -2.0)))))
    assert decode_delta(encode_delta(prompt)) == prompt
    assert decode_complete(encode_complete("m", (3, 0, 7), more)) == ("m", array("i", (3, 0, 7)), more)
    both = inference_pb2.CompleteRequest(prompt="hi", prompt_tokens=[3])
    with pytest.raises(InvalidRequest, match="prompt"):
        decode_complete(both.SerializeToString())
    likely = Delta("a", (TextToken(1, "a", False, -0.5, ((1, "a", -0.5), (2, "b", -1.5))),))
    assert decode_delta(encode_delta(likely)) == likely
    bound = replace(OPTIONS, grammar=Grammar("regex", "a+"))
    assert decode_complete(encode_complete("m", "hi", bound)) == ("m", "hi", bound)
    assert decode_chat(encode_chat("m", (Message("user", "hi"),), OPTIONS)) == ("m", (Message("user", "hi"),), OPTIONS)
    assert decode_complete(encode_complete("m", "hi", ChatOptions())) == ("m", "hi", ChatOptions())
    begun = ChatOptions(begun=PartialAnswer("whose", array("i", (3, 1, 2))))
    assert decode_complete(encode_complete("m", "hi", begun)) == ("m", "hi", begun)
    first = Delta("a", (TextToken(1, "a"),), identity="whose")
    assert decode_delta(encode_delta(first)) == first
    assert decode_delta(encode_delta(DELTA)) == DELTA and decode_delta(encode_delta(Delta("x"))) == Delta("x")
    wire = inference_pb2.CompleteResponse.FromString(encode_delta(DELTA))
    assert wire.delta.text == DELTA.text and wire.SerializeToString() == encode_delta(DELTA)
    assert decode_models(encode_models(["m", "n"])) == ["m", "n"]


def test_another_protocol_version_is_refused_by_name() -> None:
    with pytest.raises(PairingError) as refused:
        decode_target_hello(encode_target_hello(replace(TARGET_HELLO, protocol_version=2)))
    assert refused.value.field == "protocol_version"


@pytest.mark.parametrize(("field", "value"), [
    ("vocab_size", 0), ("max_context", 0), ("hidden_size", 0), ("num_layers", 0), ("model_id", "x" * 300)])
def test_target_hello_names_the_bad_field(field: str, value: object) -> None:
    with pytest.raises(RemoteProtocolError) as refused:
        decode_target_hello(encode_target_hello(replace(TARGET_HELLO, **{field: value})))
    assert refused.value.field == field


@pytest.mark.parametrize(("item", "field"), [
    (growth(ids=(1, 1)), "growth.ids"),
    (growth(ids=(0, 2)), "growth.ids"),
    (growth(ids=(-3, 2)), "growth.ids"),
    (growth(parents=(0, 1)), "growth.parents"),
    (growth(parents=(2, 1)), "growth.parents"),
    (growth(parents=(1, 1)), "growth.parents"),
    (growth(parents=(-CONTEXT - 1, 1)), "growth.parents"),
    (growth(tokens=(VOCAB, 1)), "growth.tokens"),
    (growth(tokens=(-1, 1)), "growth.tokens"),
    (growth(parents=(-5, -5), tokens=(4, 4)), "growth.tokens"),
    (growth(tokens=(10,)), "growth.tokens"),
    (growth(scores=(0.5, 0.0)), "growth.scores"),
    (growth(scores=(float("nan"), 0.0)), "growth.scores"),
    (growth(scores=(float("-inf"), 0.0)), "growth.scores"),
    (growth(base=0), "growth.base"),
    (growth(base=CONTEXT + 1), "growth.base"),
    (growth(range(1, 65), [-5] * 64, range(64), [-1.0] * 64), "growth.ids"),
    (Drop(3, "x" * 300), "drop.reason"),
    (Drop(3, "gap", CONTEXT + 1), "drop.base"),
])
def test_bad_growth_costs_its_session_only(item: Growth | Drop, field: str) -> None:
    good = growth(session=8)
    frames, left = encode_draft_frames(INCARNATION, [good, item, good], MAX_BYTES)
    items, faults = decode_draft_frame(frames[0], INCARNATION, LIMITS)
    assert left == [] and len(items) == 2 and all(same(item, good) for item in items)
    assert [(session, fault.field) for session, fault in faults] == [(3, field)]


def test_a_reason_of_another_release_is_no_fault() -> None:
    drop = Drop(3, "asleep", 4)
    frames, _ = encode_draft_frames(INCARNATION, [drop], MAX_BYTES)
    assert decode_draft_frame(frames[0], INCARNATION, LIMITS) == ([drop], [])


def test_a_frame_of_a_draft_holds_no_more_than_could_be_asked_for() -> None:
    (frame,), _ = encode_draft_frames(INCARNATION, [Growth.empty(1, 5)] * 33, MAX_BYTES)
    assert len(decode_draft_frame(frame, INCARNATION, LIMITS, 33)[0]) == 33
    with pytest.raises(RemoteProtocolError, match="33 in a frame where 32 may be"):
        decode_draft_frame(frame, INCARNATION, LIMITS, 32)


def test_many_items_leave_in_several_frames() -> None:
    frames, left = encode_draft_frames(INCARNATION, [Growth.empty(1, 5)] * 4097, MAX_BYTES)
    assert not left and sum(len(decode_draft_frame(frame, INCARNATION, LIMITS)[0]) for frame in frames) == 4097


def test_scores_just_above_zero_become_zero() -> None:
    frame = encode_draft_frames(INCARNATION, [growth(scores=(1e-6, -1.0))], MAX_BYTES)[0][0]
    items, faults = decode_draft_frame(frame, INCARNATION, LIMITS)
    assert faults == [] and items[0].scores.tolist() == [0.0, -1.0]


@pytest.mark.parametrize(("item", "field"), [
    (Open(3, ints(), 0, Sampling()), "open.tokens"),
    (Open(3, ints(*[1] * (CONTEXT + 1)), 1, Sampling()), "open.tokens"),
    (Open(3, ints(1, VOCAB), 1, Sampling()), "open.tokens"),
    (Open(3, ints(1, 2), 3, Sampling()), "open.prompt_len"),
    (Open(3, ints(1, 2), 0, Sampling()), "open.prompt_len"),
    (Open(3, ints(1, 2), 2, Sampling(stop_token_ids=(VOCAB,))), "stop_token_ids"),
    (Open(3, ints(1, 2), 2, Sampling(logit_bias=((VOCAB, 1.0),))), "logit_bias"),
    (Open(3, ints(-1, 2), 2, Sampling()), "open.tokens"),
    (Commit(3, 5, ints()), "commit.tokens"),
    (Commit(3, 5, ints(*range(65))), "commit.tokens"),
    (Commit(3, 5, ints(1, -1)), "commit.tokens"),
    (Commit(3, 5, ints(1, VOCAB)), "commit.tokens"),
    (Commit(3, CONTEXT, ints(1)), "commit.base"),
    (Commit(3, 0, ints(1)), "commit.base"),
    (Commit(3, 5, ints(1), wanted=64), "commit.wanted"),
    (Open(3, ints(1, 2), 2, Sampling(), 64), "open.wanted"),
    (Commit(3, 6, ints(1, 2), FEATURES), "features.start"),
    (Commit(3, 5, ints(1), FEATURES), "features.num_rows"),
    (Commit(4, 5, ints(1, 2), FEATURES), "features.session"),
    (replace(FEATURES, session=3, rows=bytes(13)), "features.rows"),
    (replace(FEATURES, num_rows=3), "features.rows"),
    (replace(FEATURES, num_rows=0, rows=b""), "features.num_rows"),
    (replace(FEATURES, dtype="float16"), "features.dtype"),
    (replace(FEATURES, start=CONTEXT - 1), "features.start"),
])
def test_bad_target_item_costs_its_session_only(item: object, field: str) -> None:
    good = Close(8)
    frames, _ = encode_target_frames(INCARNATION, [good, item, good], MAX_BYTES)
    items, faults = decode_target_frame(frames[0], INCARNATION, LIMITS)
    assert items == [good, good]
    assert [(session in (3, 4), fault.field) for session, fault in faults] == [(True, field)]


def test_a_session_says_whom_it_belongs_to_in_the_one_form() -> None:
    shown = f"00-{'a' * 32}-{'b' * 16}-01"
    for trace, taken in ((shown, shown), ("", ""), (shown + "; drop", "")):
        item = Open(3, ints(1, 2), 1, SAMPLING, 9, trace)
        frame = encode_target_frames(INCARNATION, [item], MAX_BYTES)[0][0]
        found, _ = decode_target_frame(frame, INCARNATION, LIMITS)
        assert isinstance(found[0], Open) and found[0].trace == taken


def test_features_nobody_reads_are_refused() -> None:
    frame = encode_target_frames(INCARNATION, [FEATURES], MAX_BYTES)[0][0]
    _, faults = decode_target_frame(frame, INCARNATION, FrameLimits(VOCAB, CONTEXT))
    assert [fault.field for _, fault in faults] == ["features"]


def test_hostile_sampling_is_refused() -> None:
    wire = draft_pb2.TargetItem(open=draft_pb2.OpenItem(session=3, tokens=bytes(4), prompt_len=1))
    wire.open.sampling.temperature = float("nan")
    data = draft_pb2.ExchangeRequest(frame=draft_pb2.TargetFrame(incarnation=INCARNATION, items=[wire]))
    items, faults = decode_target_frame(data.SerializeToString(), INCARNATION, LIMITS)
    assert items == [] and [(session, fault.field) for session, fault in faults] == [(3, "temperature")]


def test_stale_and_foreign_frames_raise() -> None:
    frame = encode_draft_frames(INCARNATION, DRAFT_ITEMS, MAX_BYTES)[0][0]
    with pytest.raises(RemoteProtocolError) as stale:
        decode_draft_frame(frame, INCARNATION + 1, LIMITS)
    assert stale.value.field == "incarnation"
    with pytest.raises(RemoteProtocolError) as foreign:
        decode_draft_frame(encode_draft_hello(DRAFT_HELLO), INCARNATION, LIMITS)
    assert foreign.value.field == "frame"


def test_limits_come_from_both_hellos() -> None:
    assert FrameLimits.of(TARGET_HELLO, DRAFT_HELLO) == FrameLimits(VOCAB, CONTEXT, 63, 128, "bfloat16")
    assert FrameLimits.of(TARGET_HELLO, replace(DRAFT_HELLO, features=None, max_nodes=9)).max_nodes == 9


def test_frames_split_between_items_and_rows_and_keep_their_order() -> None:
    wide = FrameLimits(VOCAB, CONTEXT, 63, 100, "float32")
    rows = np.arange(200 * 100, dtype="<f4").tobytes()
    items = [Commit(3, 5, ints(1)), Features(3, 0, rows, 200, "float32"), Close(3)]
    frames, left = encode_target_frames(INCARNATION, items, 10_000)
    assert left == [] and len(frames) > 8 and max(map(len, frames)) <= 10_000
    decoded = [item for frame in frames for item in decode_target_frame(frame, INCARNATION, wide)[0]]
    chunks = decoded[1:-1]
    assert same(decoded[0], items[0]) and decoded[-1] == items[2]
    assert b"".join(chunk.rows for chunk in chunks) == rows
    assert [chunk.start for chunk in chunks] == np.cumsum([0] + [chunk.num_rows for chunk in chunks[:-1]]).tolist()


def test_an_item_that_fits_no_frame_is_handed_back() -> None:
    big = Open(3, ints(*range(400)), 1, Sampling())
    frames, left = encode_target_frames(INCARNATION, [Close(1), big, Close(2)], 1000)
    decoded = [item for frame in frames for item in decode_target_frame(frame, INCARNATION, LIMITS)[0]]
    assert left == [big] and decoded == [Close(1), Close(2)]
    row = Features(3, 0, bytes(1200), 1, "float32")
    frames, left = encode_target_frames(INCARNATION, [Close(1), row], 1000)
    assert len(frames) == 1 and left == [row], "a row is in one piece"


def test_rows_of_many_frames_are_not_copied_again_and_again() -> None:
    """What the texts of a full house have is written while the event loop stands still."""
    rows, most = bytes(1 << 18), 1 << 20
    items = [Features(1, 0, rows, 4, "float32")] * 64
    tracemalloc.start()
    frames, left = encode_target_frames(INCARNATION, items, most)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not left and sum(map(len, frames)) > 64 * len(rows)
    assert peak < 1.5 * 64 * len(rows), peak


@pytest.mark.parametrize(("request_", "field"), [
    (replace(REQUEST, tokens=()), "prompt"),
    (replace(REQUEST, tokens=(VOCAB,)), "prompt"),
    (replace(REQUEST, tokens=(1,) * (2 * CONTEXT)), "prompt"),
    (replace(REQUEST, max_tokens=1 << 31), "max_tokens"),
    (replace(REQUEST, prompt_logprobs=21), "prompt_logprobs"),
    (replace(REQUEST, tokens=(1,) * CONTEXT, allowed_token_ids=(VOCAB,)), "allowed_token_ids"),
    (replace(REQUEST, allowed_token_ids=(1,) * (MAX_ALLOWED + 1)), "allowed_token_ids"),
    (replace(REQUEST, bad_words=((1, VOCAB),)), "bad_words"), (replace(REQUEST, bad_words=((),)), "bad_words"),
    (replace(REQUEST, bad_words=((1,) * (MAX_BAD_WORD_TOKENS + 1),)), "bad_words"),
    (replace(REQUEST, bad_words=((1,),) * (MAX_BAD_WORDS + 1)), "bad_words"),
    (replace(REQUEST, top_logprobs=21), "top_logprobs"), (replace(REQUEST, answered=3), "answered"),
    (replace(REQUEST, tokens=(1, 2, 3), answered=2, max_tokens=2), "answered"),
    (replace(REQUEST, request_id="x" * 300), "request_id"),
    (replace(REQUEST, namespace="x" * 65), "namespace"),
    (replace(REQUEST, namespace="a b"), "namespace"),
    (replace(REQUEST, namespace="a\n"), "namespace"),
    (replace(REQUEST, sampling=Sampling(logit_bias=((VOCAB, 1.0),))), "logit_bias"),
    (replace(REQUEST, sampling=Sampling(stop_token_ids=(VOCAB,))), "stop_token_ids"),
    (replace(REQUEST, tokens=(-1,)), "prompt"),
])
def test_bad_request_is_the_clients_fault(request_: Request, field: str) -> None:
    """Be it found when it is read or, as all backends do, before anything is done for it."""
    with pytest.raises(InvalidRequest) as refused:
        [(_, found)] = asked(encode_answer_request(3, request_))
        assert isinstance(found, Request)
        SERVED.check(found, 2 * CONTEXT)
    assert refused.value.field == field


@pytest.mark.parametrize("request_", [
    replace(REQUEST, sampling=Sampling(100.0, 1 << 30, 1.0, 1.0, 2.0, 2.0, 100.0, ((1, 100.0),) * MAX_LOGIT_BIASES,
                                       1 << 30, (1,) * MAX_STOP_TOKEN_IDS, 2**64 - 1)),
    replace(REQUEST, sampling=Sampling(0.0, 0, 1e-30, 0.0, -2.0, -2.0, 1e-30, ((1, -100.0),), 0, (), 0)),
    replace(REQUEST, tokens=(VOCAB - 1,) * (CONTEXT - 1), max_tokens=CONTEXT + 1, top_logprobs=20),
    replace(REQUEST, tokens=(0,), prompt_logprobs=20, max_tokens=0),
    replace(REQUEST, tokens=(1, 2, 3), answered=2, max_tokens=3),
    replace(REQUEST, allowed_token_ids=(VOCAB - 1,) * MAX_ALLOWED,
            bad_words=((1,) * MAX_BAD_WORD_TOKENS,) * MAX_BAD_WORDS)])
def test_what_stands_on_a_limit_is_taken(request_: Request) -> None:
    assert asked(encode_answer_request(3, request_)) == [(3, request_)]
    SERVED.check(request_, 2 * CONTEXT)


def test_a_target_answers_for_no_other_model() -> None:
    """One that was exchanged since its router's last poll would go on with an answer of the model before."""
    for identity in (None, SERVED.identity):
        SERVED.check(replace(REQUEST, identity=identity), CONTEXT)
    for other in ("weights", "dtype", "quantize", "kernels"):
        with pytest.raises(ModelChanged):
            SERVED.check(replace(REQUEST, identity=replace(SERVED.identity, **{other: "other"})), CONTEXT)


@pytest.mark.parametrize(("field", "start"), [
    ("bad_words", target_pb2.GenerateStart(bad_words=[common_pb2.TokenRun(tokens=[1] * (MAX_BAD_WORD_TOKENS + 1))])),
    ("bad_words", target_pb2.GenerateStart(bad_words=[common_pb2.TokenRun(tokens=[1])] * (MAX_BAD_WORDS + 1))),
    ("allowed_token_ids", target_pb2.GenerateStart(allowed_token_ids=[1] * (MAX_ALLOWED + 1))),
    ("logit_bias", target_pb2.GenerateStart(sampling=common_pb2.Sampling(
        logit_bias=[common_pb2.LogitBias(token_id=1)] * (MAX_LOGIT_BIASES + 1)))),
    ("stop_token_ids", target_pb2.GenerateStart(sampling=common_pb2.Sampling(
        stop_token_ids=[1] * (MAX_STOP_TOKEN_IDS + 1))))])
def test_a_long_list_is_refused_before_anything_is_made_of_it(field: str, start: target_pb2.GenerateStart) -> None:
    frame = target_pb2.GenerateManyRequest.FromString(encode_answer_request(3, REQUEST))
    frame.items[0].start.MergeFrom(start)
    [(number, error)] = decode_answer_requests(frame.SerializeToString())
    assert number == 3 and isinstance(error, InvalidRequest) and error.field == field


def test_scores_of_a_prompt_are_so_many_at_most() -> None:
    most = replace(REQUEST, tokens=(1,) * (MAX_SCORES // 21), prompt_logprobs=20)
    SERVED.check(most, 1 << 20)
    with pytest.raises(InvalidRequest, match="prompt_logprobs"):
        SERVED.check(replace(most, tokens=(1, *most.tokens)), 1 << 20)


@pytest.mark.parametrize("wire", [
    common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_REGEX), common_pb2.Grammar(source="a"),
    common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_LARK, source="a" * (MAX_SOURCE + 1)),
    common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_LARK, source="é" * (MAX_SOURCE // 2 + 1))])
def test_bad_grammar_is_refused_by_name(wire: common_pb2.Grammar) -> None:
    frame = target_pb2.GenerateManyRequest.FromString(encode_answer_request(3, REQUEST))
    frame.items[0].start.grammar.CopyFrom(wire)
    [(number, error)] = decode_answer_requests(frame.SerializeToString())
    assert number == 3 and isinstance(error, InvalidRequest) and error.field == "grammar"


def test_a_frame_of_too_many_items_is_refused_before_they_are_made() -> None:
    frame = target_pb2.GenerateManyRequest(items=[target_pb2.AnswerRequest(answer=1)] * (MAX_ANSWER_ITEMS + 1))
    with pytest.raises(RemoteProtocolError, match="items"):
        next(decode_answer_requests(frame.SerializeToString()))


def test_an_option_its_field_cannot_hold_is_named() -> None:
    with pytest.raises(InvalidRequest) as refused:
        encode_complete("m", "hi", ChatOptions(max_tokens=-1))
    assert refused.value.field == "max_tokens"


# Random values come back.

tokens_ = st.integers(0, VOCAB - 1)
sessions = st.integers(0, 2**64 - 1)


@st.composite
def growths(draw: st.DrawFn) -> Growth:
    count = draw(st.integers(0, 63))
    ids = draw(st.lists(st.integers(1, 2**31 - 1), min_size=count, max_size=count, unique=True))
    base = draw(st.integers(1, CONTEXT))
    parents = [draw(st.sampled_from([-base, *ids[:n]])) for n in range(count)]
    tokens = draw(st.lists(tokens_, min_size=count, max_size=count, unique=True))
    scores = draw(st.lists(st.floats(-100, 0, width=32), min_size=count, max_size=count))
    return Growth(draw(sessions), base, ints(*ids), ints(*parents), ints(*tokens), np.array(scores, np.float32))


@given(st.lists(st.tuples(st.integers(-1, 6), st.integers(-9, 6), st.integers(-1, 3)), max_size=5), st.booleans())
def test_growths_are_good_or_not_by_each_node(nodes: list[tuple[int, int, int]], chain: bool) -> None:
    ids, parents, tokens = ([node[part] for node in nodes] for part in range(3))
    if chain:
        parents[1:] = ids[:-1]
    edges = list(zip(parents, tokens, strict=True))
    good = (all(node > 0 for node in ids) and len(set(ids)) == len(ids) and len(set(edges)) == len(edges)
            and all(0 <= token < 3 for token in tokens) and all(parent >= -8 and parent != 0 for parent in parents)
            and all(parent not in ids[place:] for place, parent in enumerate(parents)))
    item = growth(ids, parents, tokens, [-0.5] * len(nodes))
    found, faults = decode_draft_frame(encode_draft_frames(INCARNATION, [item], MAX_BYTES)[0][0], INCARNATION,
                                       FrameLimits(3, 8))
    assert (len(found), len(faults)) == ((1, 0) if good else (0, 1))


@st.composite
def features(draw: st.DrawFn, dtype: str, session: int | None = None, start: int | None = None,
             count: int | None = None) -> Features:
    num_rows = draw(st.integers(1, 20)) if count is None else count
    size = num_rows * WIDTH * FEATURE_DTYPES[dtype]
    first = draw(st.integers(0, CONTEXT - num_rows)) if start is None else start
    rows = draw(st.binary(min_size=size, max_size=size))
    return Features(draw(sessions) if session is None else session, first, rows, num_rows, dtype)


@st.composite
def commits(draw: st.DrawFn, dtype: str) -> Commit:
    tokens = draw(st.lists(tokens_, min_size=1, max_size=64))
    session, base = draw(sessions), draw(st.integers(1, CONTEXT - 64))
    rows = draw(features(dtype, session, base - 1, len(tokens))) if len(tokens) < 10 else None
    return Commit(session, base, ints(*tokens), rows, draw(st.integers(0, 63)), draw(st.booleans()))


@st.composite
def opens(draw: st.DrawFn) -> Open:
    tokens = draw(st.lists(tokens_, min_size=1, max_size=30))
    sampling = Sampling(
        temperature=draw(st.floats(0, 100)), top_k=draw(st.integers(0, 1 << 30)),
        top_p=draw(st.floats(0, 1, exclude_min=True)), min_p=draw(st.floats(0, 1)),
        presence_penalty=draw(st.floats(-2, 2)), frequency_penalty=draw(st.floats(-2, 2)),
        logit_bias=tuple(draw(st.lists(st.tuples(tokens_, st.floats(-100, 100)), max_size=5))),
        min_tokens=draw(st.integers(0, 1 << 30)), stop_token_ids=tuple(draw(st.lists(tokens_, max_size=5))),
        seed=draw(sessions))
    return Open(draw(sessions), ints(*tokens), draw(st.integers(1, len(tokens))), sampling, draw(st.integers(0, 63)),
                ahead=draw(st.booleans()))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(sorted(FEATURE_DTYPES)), sessions)
def test_target_frames_come_back(data: st.DataObject, dtype: str, incarnation: int) -> None:
    kinds = st.one_of(opens(), features(dtype), commits(dtype), st.builds(Close, sessions))
    items = data.draw(st.lists(kinds, max_size=4))
    frames, left = encode_target_frames(incarnation, items, MAX_BYTES)
    decoded, faults = decode_target_frame(frames[0], incarnation, replace(LIMITS, feature_dtype=dtype))
    assert left == [] and faults == [] and len(decoded) == len(items)
    assert all(same(left, right) for left, right in zip(items, decoded, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(growths(), st.builds(Drop, sessions, st.text(max_size=20), st.integers(0, CONTEXT))),
                max_size=4), sessions)
def test_draft_frames_come_back(items: list[Growth | Drop], incarnation: int) -> None:
    frames, left = encode_draft_frames(incarnation, items, MAX_BYTES)
    decoded, faults = decode_draft_frame(frames[0], incarnation, LIMITS)
    assert left == [] and faults == [] and len(decoded) == len(items)
    assert all(same(left, right) for left, right in zip(items, decoded, strict=True))


# Any bytes: a value or a typed error.

DECODERS = {
    "target_hello": decode_target_hello,
    "draft_hello": decode_draft_hello,
    "target_frame": lambda data: decode_target_frame(data, INCARNATION, LIMITS),
    "draft_frame": lambda data: decode_draft_frame(data, INCARNATION, LIMITS),
    "start": asked,
    "control": asked,
    "piece": told,
    "info": decode_info,
    "chat": decode_chat,
    "complete": decode_complete,
    "delta": decode_delta,
    "models": decode_models,
}


def outcome(name: str, data: bytes) -> str:
    try:
        DECODERS[name](data)
    except (RemoteProtocolError, InvalidRequest) as error:
        return type(error).__name__
    return "value"


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_corrupted_bytes_give_a_value_or_a_typed_error(name: str) -> None:
    seed = 20260
    rng = np.random.default_rng(seed)
    whole = encoded()[name]
    outcomes = set()
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            data[rng.integers(len(data))] = rng.integers(256)
        outcomes.add(outcome(name, bytes(data[: rng.integers(1, len(data) + 1)])))
    assert outcomes <= {"value", "RemoteProtocolError", "PairingError", "InvalidRequest"}, f"seed {seed}"
    assert outcomes != {"value"}, f"seed {seed}: nothing was refused"


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(DECODERS)), st.binary(max_size=200))
def test_random_bytes_give_a_value_or_a_typed_error(name: str, data: bytes) -> None:
    assert outcome(name, data) in {"value", "RemoteProtocolError", "PairingError", "InvalidRequest"}


@st.composite
def nearly_right(draw: st.DrawFn) -> tuple[bytes, ...]:
    """A growth's ids, parents, tokens and scores: as many of each, but for one in ten; few are out of their range."""
    count = draw(st.integers(0, 4))

    def part(values: st.SearchStrategy[int] | st.SearchStrategy[float], kind: str) -> bytes:
        size = count + (draw(st.integers(0, 9)) == 9)
        return np.array(draw(st.lists(values, min_size=size, max_size=size)), kind).tobytes()

    return (part(st.integers(0, 99), "<i4"), part(st.integers(-9, -1), "<i4"), part(st.integers(0, VOCAB), "<i4"),
            part(st.floats(-9, 0.125, width=32), "<f4"))


def test_random_growth_keeps_the_rules_or_is_a_fault() -> None:
    kept = 0

    @settings(max_examples=300, deadline=None)
    @given(st.one_of(st.tuples(*[st.binary(max_size=24)] * 4), nearly_right()),
           st.one_of(st.integers(0, 2**32 - 1), st.integers(0, CONTEXT + 1)))
    def tried(parts: tuple[bytes, ...], base: int) -> None:
        nonlocal kept
        wire = draft_pb2.DraftItem(growth=draft_pb2.GrowthItem(
            session=3, base=base, **dict(zip(("ids", "parents", "tokens", "scores"), parts, strict=True))))
        frame = draft_pb2.DraftFrame(incarnation=INCARNATION, items=[wire])
        data = draft_pb2.ExchangeResponse(frame=frame).SerializeToString()
        items, faults = decode_draft_frame(data, INCARNATION, LIMITS)
        assert len(items) + len(faults) == 1
        for item in items:
            kept += len(item.ids) > 0
            assert 1 <= item.base <= CONTEXT
            assert len(item.ids) == len(item.parents) == len(item.tokens) == len(item.scores)
            assert (item.ids > 0).all() and ((item.tokens >= 0) & (item.tokens < VOCAB)).all()
            assert np.isfinite(item.scores).all() and (item.scores <= 0).all()

    tried()
    assert kept, "all were faults"
