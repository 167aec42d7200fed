"""Keyed sampling beside a sampler and a rejection sampler that have the methods of vLLM 0.32's, without vLLM."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from slipstream_vllm.adapter_0_32 import patch_sampling, patch_seeds, rows_of
from slipstream_vllm.remote import RemoteDrafter
from slipstream_vllm.sampling import SamplingCache, sampling_of, with_named_tokens

from slipstream.choosing.sampling import ChoiceRows, choose, log_probabilities
from slipstream.protocol.messages import Open
from slipstream.protocol.requests import Sampling
from slipstream.wire.codec import FrameLimits, decode_target_frame, encode_target_frames

VOCAB, PROMPT, CHAIN = 40, [3, 1, 4, 1, 5], 4
# Texts so far, and what the session of each says -> a chain for each.
Draft = Callable[[Sequence[list[int]], Sequence[Sampling]], list[list[int]]]


@dataclass
class Params:
    """As much of ``SamplingParams`` as is read."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = 7
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    max_tokens: int = 1000
    ignore_eos: bool = True
    stop_token_ids: tuple[int, ...] = ()
    eos_token_id: int | None = None
    extra_args: None = None
    all_stop_token_ids: frozenset[int] = frozenset()


KINDS = [Params(), Params(temperature=0.7, top_p=0.9, top_k=9), Params(top_p=0.6, seed=-5), Params(temperature=0.0),
         Params(top_k=3, seed=1 << 63), Params(temperature=2.5, min_p=0.2), Params(presence_penalty=1.5, top_p=0.8)]


def logits_after(text: Sequence[int]) -> torch.Tensor:
    """[V]: the model. One row, whatever else is computed."""
    return logits_behind(tuple(text[-3:]))


@cache
def logits_behind(tokens: tuple[int, ...]) -> torch.Tensor:
    made = np.random.default_rng(abs(hash(tokens)))
    return torch.from_numpy(made.normal(0.0, 2.0, VOCAB).astype(np.float32))


@dataclass
class Metadata:
    all_greedy: bool
    all_random: bool
    presence: list[float]
    outputs: list[list[int]]
    spec: list[list[int]]
    max_num_logprobs: int | None = None
    logprob_token_ids: None = None


def penalised(row: torch.Tensor, presence: float, output: Sequence[int]) -> torch.Tensor:
    row = row.clone()
    row[list(set(output))] -= presence
    return row


class Sampler:
    """One row a request: the only one, or the one behind its draft tokens."""

    def __init__(self, mode: str) -> None:
        self.logprobs_mode = mode
        self.told: torch.Tensor | None = None  # log probabilities [B, V]

    def __call__(self, logits: torch.Tensor, metadata: Metadata) -> torch.Tensor:
        rows = [penalised(row, presence, [*output, *spec]) for row, presence, output, spec
                in zip(logits, metadata.presence, metadata.outputs, metadata.spec, strict=True)]
        chosen, self.told = self.sample(torch.stack(rows), metadata)
        assert (self.told is not None) is (metadata.max_num_logprobs is not None)
        return chosen

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1)

    def greedy_sample(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(1).to(torch.int32)

    def sample(self, logits: torch.Tensor, metadata: Metadata) -> tuple[torch.Tensor, None]:
        assert metadata.all_greedy, "vLLM's own sampling was used"
        return self.greedy_sample(logits), None


class Verifier:
    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.told = list[list[float]]()  # of each request's new tokens

    def __call__(self, spec: Any, probs: None, logits: torch.Tensor, metadata: Metadata) -> list[list[int]]:
        return self.forward(spec, probs, logits, metadata)

    def forward(self, spec: Any, probs: None, logits: torch.Tensor, metadata: Metadata) -> list[list[int]]:
        ends = np.cumsum([count + 1 for count in spec.num_draft_tokens]) - 1
        bonus = self._sampler(logits[ends.tolist()], metadata).tolist()
        inner = np.delete(np.arange(len(logits)), ends).tolist()
        rows = self.apply_logits_processors(logits[inner], metadata, spec)
        assert metadata.all_greedy, "vLLM's rejection sampling was used"
        best, given = rows.argmax(1).tolist(), list[list[int]]()
        for count, last, chain in zip(spec.num_draft_tokens, bonus, metadata.spec, strict=True):
            own, best = best[:count], best[count:]
            wrong = next((at for at in range(count) if own[at] != chain[at]), None)
            given.append([*own, last] if wrong is None else own[: wrong + 1])
        if metadata.max_num_logprobs is not None:
            whole = torch.zeros_like(logits)
            whole[inner], whole[ends.tolist()] = rows, self._sampler.told
            self.told = self._get_logprobs_tensors(metadata.max_num_logprobs, spec, logits, rows, whole, given)
        return given

    def _get_logprobs_tensors(self, _num_top: int, spec: Any, _logits: torch.Tensor, verified: torch.Tensor,
                              whole: torch.Tensor, given: list[list[int]]) -> list[list[float]]:
        starts = np.cumsum([0, *(count + 1 for count in spec.num_draft_tokens)])[:-1].tolist()
        inner = [start + at for start, count in zip(starts, spec.num_draft_tokens, strict=True) for at in range(count)]
        whole[inner] = verified
        logged = self._sampler.compute_logprobs(whole)
        return [[logged[start + at, token].item() for at, token in enumerate(tokens)]
                for start, tokens in zip(starts, given, strict=True)]

    def apply_logits_processors(self, logits: torch.Tensor, metadata: Metadata, spec: Any) -> torch.Tensor:
        rows = list[torch.Tensor]()
        for presence, output, chain in zip(metadata.presence, metadata.outputs, metadata.spec, strict=True):
            for before in range(len(chain)):
                rows.append(penalised(logits[len(rows)], presence, [*output, *chain[:before]]))
        return torch.stack(rows) if rows else logits


class Drafter(RemoteDrafter):
    def __init__(self) -> None:
        self.keyed, self.chooser = True, None


class Runner:
    """As much of ``GPUModelRunner`` as the adapter reads."""

    def __init__(self, asked: Sequence[Params], prompt: Sequence[int] = PROMPT, mode: str = "raw_logprobs") -> None:
        self.drafter, self.sampler = Drafter(), Sampler(mode)
        self.rejection_sampler = Verifier(self.sampler)
        self.model_config = SimpleNamespace(seed=0, logprobs_mode=mode)
        self.vllm_config = SimpleNamespace(model_config=self.model_config, speculative_config=SimpleNamespace(
            rejection_sample_method="standard"))
        self.device, self.max_model_len = SimpleNamespace(type="cpu"), 4096
        names = [f"request-{place}" for place in range(len(asked))]
        self.requests = {name: SimpleNamespace(sampling_params=params)
                         for name, params in zip(names, asked, strict=True)}
        self.texts = [list(prompt) for _ in asked]
        self.prompt = len(prompt)
        greedy = [params.temperature == 0.0 for params in asked]
        self.metadata = Metadata(all(greedy), not any(greedy), [params.presence_penalty for params in asked], [], [])
        self.input_batch = SimpleNamespace(req_ids=names, sampling_metadata=self.metadata, vocab_size=VOCAB,
                                           generators={0: "vLLM's"})

    def _sample(self, logits: torch.Tensor, spec: Any) -> list[list[int]]:
        if spec is None:
            return [[token] for token in self.sampler(logits, self.metadata).tolist()]
        return self.rejection_sampler(spec, None, logits, self.metadata)

    def step(self, chains: Sequence[Sequence[int]]) -> list[list[int]]:
        """Verify a chain for each request."""
        self.input_batch.num_tokens_no_spec = np.array([len(text) for text in self.texts])
        self.metadata.outputs = [text[self.prompt :] for text in self.texts]
        self.metadata.spec = [list(chain) for chain in chains]
        rows = [logits_after([*text, *chain[:at]]) for text, chain in zip(self.texts, chains, strict=True)
                for at in range(len(chain) + 1)]
        spec = SimpleNamespace(num_draft_tokens=[len(chain) for chain in chains]) if any(chains) else None
        new = self._sample(torch.stack(rows), spec)
        for text, tokens in zip(self.texts, new, strict=True):
            text += tokens
        return new


patch_sampling(Runner)


def answers(asked: Sequence[Params], tokens: int, draft: Draft | None = None, prompt: Sequence[int] = PROMPT,
            mode: str = "raw_logprobs") -> tuple[list[list[int]], int]:
    """Texts without the prompt, and how many draft tokens were accepted."""
    runner, known, accepted = Runner(asked, prompt, mode), SamplingCache(0, VOCAB), 0
    while min(map(len, runner.texts)) < len(prompt) + tokens:
        chains = [list[int]() for _ in asked]
        if draft is not None:
            sessions = [known.of(name, params)[0] for name, params in zip(runner.requests, asked, strict=True)]
            short = [place for place, text in enumerate(runner.texts) if len(text) < len(prompt) + tokens]
            found = draft([runner.texts[place] for place in short], [sessions[place] for place in short])
            for place, chain in zip(short, found, strict=True):
                chains[place] = chain
        accepted += sum(len(new) - 1 for new in runner.step(chains))
    return [text[len(prompt) : len(prompt) + tokens] for text in runner.texts], accepted


def row(sampling: Sampling, position: int, place: int = 0) -> ChoiceRows:
    return ChoiceRows(sampling, range(place, place + 1), range(position, position + 1), [0], None, [()])


def shared(texts: Sequence[list[int]], samplings: Sequence[Sampling],
           lengths: Sequence[int] | None = None) -> list[list[int]]:
    """A drafter with the target's own weights and the sessions' noise. ``lengths``: of the chains; None: CHAIN."""
    chains = [list[int]() for _ in texts]
    for depth in range(CHAIN):
        grown = [place for place in range(len(texts)) if lengths is None or depth < lengths[place]]
        scores, wanted = list[torch.Tensor](), list[ChoiceRows]()
        for place in grown:
            sampling, said = samplings[place], [*texts[place], *chains[place]]
            scores.append(penalised(logits_after(said), sampling.presence_penalty, said[len(PROMPT) :]))
            wanted.append(row(replace(sampling, presence_penalty=0.0), len(said), len(wanted)))
        for place, token in zip(grown, choose(torch.stack(scores), wanted) if grown else (), strict=True):
            chains[place].append(token)
    return chains


def guessing(texts: Sequence[list[int]], samplings: Sequence[Sampling], most: int = CHAIN) -> list[list[int]]:
    """Chains of any length up to ``most``, sometimes right."""
    made = [np.random.default_rng([len(text), *text[-4:], sampling.seed % 1000])
            for text, sampling in zip(texts, samplings, strict=True)]
    right = shared(texts, samplings, [int(one.integers(most + 1)) for one in made])
    return [[token if one.random() < 0.7 else int(one.integers(VOCAB)) for token in chain]
            for one, chain in zip(made, right, strict=True)]


def nines(texts: Sequence[list[int]], samplings: Sequence[Sampling]) -> list[list[int]]:
    return [[9] * CHAIN for _ in texts]


@pytest.mark.parametrize("params", KINDS, ids=range(len(KINDS)))
def test_a_token_is_the_one_that_the_engine_chooses(params: Params) -> None:
    (text,), _ = answers([params], 60)
    sampling = sampling_of(params, "request-0", 0, VOCAB)
    filters = replace(sampling, presence_penalty=0.0)
    for at, token in enumerate(text):
        scores = penalised(logits_after([*PROMPT, *text[:at]]), params.presence_penalty, text[:at])
        assert choose(scores[None], [row(filters, len(PROMPT) + at)]) == [token]


def test_answers_are_the_same_whatever_is_drafted_and_beside_whom() -> None:
    plain, _ = answers(KINDS, 60)
    for draft in (shared, guessing, nines):
        drafted, accepted = answers(KINDS, 60, draft)
        assert drafted == plain
        assert accepted or draft is nines
    assert [answers([params], 60)[0][0] for params in KINDS] == plain
    assert len({tuple(text) for text in plain}) == len(KINDS)


def test_a_drafter_that_knows_the_noise_is_always_right() -> None:
    assert answers(KINDS, 60, shared)[1] == len(KINDS) * 60 * CHAIN // (CHAIN + 1)


def test_an_answer_goes_on_elsewhere() -> None:
    params = Params(temperature=0.9, top_p=0.95)
    (whole,), _ = answers([params], 40)
    (rest,), _ = answers([params], 25, prompt=[*PROMPT, *whole[:15]])
    assert rest == whole[15:]


@pytest.mark.parametrize("params", [Params(), Params(temperature=0.7, top_p=0.9, top_k=9)], ids=["whole", "filtered"])
@pytest.mark.parametrize("draft", [None, partial(guessing, most=2)], ids=["plain", "drafted"])
def test_the_law_is_that_of_the_model(params: Params, draft: Draft | None) -> None:
    draws, at = 3000, 1  # the second token, given the first: under verification, if drafted
    texts, accepted = answers([replace(params, seed=seed) for seed in range(draws)], 2, draft)
    assert draft is None or accepted > draws / 2, "it was hardly ever chosen under verification"
    first = max(range(VOCAB), key=[text[0] for text in texts].count)
    seen = np.bincount([text[at] for text in texts if text[0] == first], minlength=VOCAB)
    session = row(sampling_of(params, "", 0, VOCAB), len(PROMPT) + at)
    law = log_probabilities(logits_after([*PROMPT, first])[None], session)[0].exp().numpy()
    assert not seen[law == 0.0].any()
    likely = law * seen.sum() >= 5
    expected = np.append(law[likely], law[~likely].sum()) * seen.sum()
    observed = np.append(seen[likely], seen[~likely].sum())
    keep = expected > 0
    assert stats.chisquare(observed[keep], expected[keep]).pvalue > 1e-3


def test_without_a_seed_one_follows_from_the_request() -> None:
    params = Params(seed=None)
    assert sampling_of(params, "a", 0, VOCAB) == sampling_of(params, "a", 0, VOCAB), "all ranks of an engine"
    assert len({sampling_of(params, request, seed, VOCAB).seed for request in "abc" for seed in (0, 1)}) == 6
    assert sampling_of(Params(seed=-1 << 63), "a", 0, VOCAB).seed == 1 << 63


def test_what_a_request_may_hold_is_never_refused() -> None:
    wild = Params(temperature=1e9, repetition_penalty=1e9, top_k=-1, all_stop_token_ids=frozenset(range(500)),
                  ignore_eos=False, min_tokens=1 << 40)
    assert math.isclose(sampling_of(wild, "a", None, VOCAB).temperature, 100.0)
    assert sampling_of(replace(wild, top_k=1 << 31), "a", None, VOCAB).top_k > 1 << 29, "as good as none"


@pytest.mark.parametrize("stop", [-1, VOCAB, 1 << 31])
def test_a_stop_that_is_no_token_of_the_model_costs_no_draft(stop: int) -> None:
    sampling = sampling_of(Params(stop_token_ids=(stop, 7)), "a", 0, VOCAB)
    frames, _ = encode_target_frames(1, [Open(1, np.array(PROMPT, np.int32), len(PROMPT), sampling)], 1 << 20)
    (opened,), faults = decode_target_frame(frames[0], 1, FrameLimits(VOCAB, 64))
    assert isinstance(opened, Open) and not faults and opened.sampling.stop_token_ids == (7,)


def test_drafts_rank_with_what_is_known_of_the_request_and_only_where_they_help() -> None:
    for mode, keyed in (("raw_logprobs", True), ("processed_logprobs", True), ("processed_logits", False)):
        runner = Runner([Params(temperature=0.8)], mode=mode)
        batch = runner.input_batch
        batch.num_tokens_no_spec, batch.num_prompt_tokens = np.array([5]), np.array([5])
        batch.token_ids_cpu = np.zeros((1, 8), np.int32)
        (row,) = rows_of(runner, SimpleNamespace(scheduled_spec_decode_tokens={}, num_spec_tokens_to_schedule=CHAIN),
                         [[1]])
        assert row.can_verify is keyed
        assert row.sampling == (sampling_of(Params(temperature=0.8), "request-0", 0, VOCAB) if keyed else Sampling())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_requests_asked_is_forgotten_when_they_are_over(temperature: float) -> None:
    """Also where all are greedy, and vLLM alone chooses."""
    runner, asked = Runner([Params()]), list[weakref.ref[Params]]()
    runner.metadata.all_greedy = temperature == 0.0
    batch = runner.input_batch
    batch.num_prompt_tokens, batch.token_ids_cpu = np.array([5]), np.zeros((1, 4096), np.int32)
    for number in range(400):
        params = Params(temperature=temperature)
        asked.append(weakref.ref(params))
        runner.requests = {f"request-{number}": SimpleNamespace(sampling_params=params)}
        batch.req_ids = list(runner.requests)
        output = SimpleNamespace(scheduled_spec_decode_tokens={}, num_spec_tokens_to_schedule=CHAIN)
        rows_of(runner, output, runner.step([[]]))
    del params
    assert sum(one() is not None for one in asked) < 100


def test_where_it_is_off_vllm_chooses() -> None:
    with pytest.raises(AssertionError, match="vLLM's own sampling was used"):
        answers([Params()], 2, mode="processed_logits")


@pytest.mark.parametrize("draft", [None, guessing, nines], ids=["plain", "guessed", "wrong"])
def test_processed_log_probabilities_are_those_that_tokens_were_drawn_with(draft: Draft | None) -> None:
    """As trainers ask for them: of our own choice, which vLLM's verification sees as a logit of infinity."""
    runner, plain = Runner(KINDS, mode="processed_logprobs"), answers(KINDS, 40)[0]
    runner.metadata.max_num_logprobs = 0
    while min(map(len, runner.texts)) < len(PROMPT) + 30:
        before = [list(text) for text in runner.texts]
        sessions = [sampling_of(params, "", 0, VOCAB) for params in KINDS]
        new = runner.step([[] for _ in KINDS] if draft is None else draft(runner.texts, sessions))
        drafted = draft is not None and any(runner.metadata.spec)
        for place, (params, sampling, tokens) in enumerate(zip(KINDS, sessions, new, strict=True)):
            for at, token in enumerate(tokens):
                text = before[place] + tokens[:at]
                scores = penalised(logits_after(text), params.presence_penalty, text[len(PROMPT) :])[None]
                law = (scores.double().log_softmax(1) if sampling.greedy else
                       log_probabilities(scores, row(replace(sampling, presence_penalty=0.0), len(text))))
                told = runner.rejection_sampler.told[place][at] if drafted else runner.sampler.told[place, token].item()
                assert told == pytest.approx(law[0, token].item(), abs=1e-5) and told > -math.inf
    for text, wanted in zip(runner.texts, plain, strict=True):
        assert text[len(PROMPT) :][:30] == wanted[:30]


@dataclass
class Asked:
    logprob_token_ids: dict[int, list[int]] | None
    max_num_logprobs: int | None


class Scoring:
    """As much of vLLM's sampler and rejection sampler as log probabilities take."""

    def __init__(self) -> None:
        self.sampler = self

    def gather_logprobs(self, logprobs: torch.Tensor, num_top: int, token_ids: torch.Tensor) -> Any:
        return num_top

    def gather_specific_token_logprobs(self, logprobs: torch.Tensor, named: dict[int, list[int]],
                                       token_ids: torch.Tensor) -> Any:
        return {row: logprobs[row, tokens].tolist() for row, tokens in named.items()}

    def forward(self, spec: Any, probs: None, logits: torch.Tensor, asked: Asked) -> Any:
        assert asked.logprob_token_ids is None or asked.max_num_logprobs is None, "a shape mismatch, which ends vLLM"
        tokens = torch.zeros(len(spec.num_draft_tokens) * (max(spec.num_draft_tokens) + 1), dtype=torch.int64)
        return None if asked.max_num_logprobs is None else self.gather_logprobs(logits, asked.max_num_logprobs, tokens)


@pytest.mark.parametrize("top", [None, 2])
def test_tokens_that_a_request_names_have_log_probabilities_in_a_drafted_step(top: int | None) -> None:
    """They had none; and beside a request that wanted the likeliest ones vLLM's engine ended."""
    verifier, spec = Scoring(), SimpleNamespace(num_draft_tokens=[0, 2])
    verify = with_named_tokens(Scoring.forward)
    logits = torch.arange(60.0).reshape(6, 10)
    found = verify(verifier, spec, None, logits, Asked({1: [7, 3]}, top))
    assert found == {3: [37.0, 33.0], 4: [47.0, 43.0], 5: [57.0, 53.0]}
    assert verify(verifier, spec, None, logits, Asked(None, top)) == top, "others have what vLLM gives them"


class Seeded:
    """A runner whose requests draw one number a step from their generators, as vLLM's do."""

    def __init__(self, device: str) -> None:
        self.device, self.discard_request_mask = SimpleNamespace(type=device), SimpleNamespace(np=np.zeros(4, bool))
        self.input_batch = SimpleNamespace(num_reqs=2, generators={place: np.random.default_rng(place)
                                                                   for place in range(2)})
        self.set_back = list[int]()

    def _sample(self, _logits: None, _spec: None) -> list[float]:
        generators = self.input_batch.generators
        return [generators[place].random() if place in generators else -1.0 for place in range(2)]

    def _bookkeeping_sync(self, answer: str) -> str:
        self.set_back += [place for place in np.flatnonzero(self.discard_request_mask.np).tolist()
                          if place in self.input_batch.generators]
        return answer

    def step(self, *parts: int) -> list[float]:
        """parts: who has only a part of its prompt computed."""
        self.discard_request_mask.np[:] = [place in parts for place in range(4)]
        drawn = self._sample(None, None)
        assert self._bookkeeping_sync("kept") == "kept"
        return drawn


patch_seeds(Seeded)


def test_a_part_of_a_prompt_draws_nothing_from_a_seed_on_a_cpu() -> None:
    whole, parted = Seeded("cpu"), Seeded("cpu")
    first, second = whole.step(), whole.step()
    assert parted.step(1) == [first[0], -1.0] and parted.step(0, 1) == [-1.0, -1.0]
    assert parted.step() == [second[0], first[1]] and not parted.set_back
    device = Seeded("cuda")
    assert device.step(1) == first and device.set_back == [1], "there vLLM sets it back"
