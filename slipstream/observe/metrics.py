"""The metrics of the services, under the prefix ``slipstream_``.

Rules:
1. Counters and histograms only; ratios are computed in PromQL. Gauges show a present state.
2. Every series has the labels ``service`` and ``model``. No label has values that users choose (request id, prompt,
   key), so their number is bounded. Tenants are named by the operator; ``MAX_TENANTS`` have their own series.
3. Methods take plain values and never fail for a value that the service may meet.
4. Each object has its own registry: several services live in one process without sharing series.
5. Counters begin at 0, not with their first event, because PromQL's ``increase`` misses an event that creates its
   series. Gauges begin when they are set, because a 0 before would be false.
6. A name has one meaning on all services.
7. ``scope`` of a mode names the decision: pool, a router for all answers of a model; session, a target for one answer.

The only importer of prometheus_client. It knows nothing about sessions, trees or sockets of the services.
"""

from __future__ import annotations

import threading
from collections import Counter as Counted
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import mul
from typing import Generic, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from slipstream import __version__
from slipstream.base.errors import STATUS

M = TypeVar("M", Counter, Gauge, Histogram)
Queued = TypeVar("Queued")
Counts = list[tuple[str, list[tuple[str, dict[str, str], float]]]]  # families: their samples' names, labels, values


@dataclass(frozen=True, slots=True)
class Series(Generic[M]):
    """A metric whose first labels are fixed; ``of`` takes the values of the other labels."""

    metric: M
    fixed_labels: tuple[str, str]
    children: dict[tuple[str, ...], M] = field(default_factory=dict)  # prometheus_client's own look-up takes a lock

    def of(self, *values: str) -> M:
        child = self.children.get(values)
        if child is None:
            child = self.children[values] = self.metric.labels(*self.fixed_labels, *values)
        return child

    def declare(self, *values: tuple[str, ...]) -> Series[M]:
        """Show a series, at 0, for each of ``values`` of the labels besides the fixed ones."""
        for labels in values:
            self.of(*labels)
        return self

    def inc(self: Series[Counter], *values: str) -> None:
        self.of(*values).inc()

    def observe(self: Series[Histogram], amount: float, *values: str) -> None:
        self.of(*values).observe(amount)

    def drop(self, *values: str) -> None:
        if self.children.pop(values, None) is not None:
            self.metric.remove(*self.fixed_labels, *values)


class Tally(Collector):
    """A histogram of whole numbers, to which many equal ones can be added at once."""

    def __init__(self, name: str, text: str, buckets: Iterable[int], labels: Mapping[str, str]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._buckets = tuple(buckets)
        self._times = Counted[int]()
        self._lock = threading.Lock()

    def add(self, number: int, times: int) -> None:
        """Count ``number`` so many ``times``. From any thread."""
        with self._lock:
            self._times[number] += times

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            counts = self._times.copy()
        buckets = [(str(float(bound)), float(sum(count for number, count in counts.items() if number <= bound)))
                   for bound in self._buckets]
        buckets.append(("+Inf", float(counts.total())))
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, float(sum(map(mul, counts, counts.values()))))
        yield family


class MergingRegistry(CollectorRegistry):
    """Metrics; for the families in ``external``, samples of another process are shown."""

    def __init__(self) -> None:
        super().__init__()
        self.external: Mapping[str, list[Sample]] = {}  # family name -> samples of the other process

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            family.samples = self.external.get(family.name, family.samples)
            yield family


class Registry:
    """The metrics of one service and model."""

    def __init__(self, service: str, model: str) -> None:
        self._collectors = MergingRegistry()
        self._fixed = (service, model)
        self.settle: Callable[[], None] = lambda: None  # called before metrics are read: it counts what is pending
        ProcessCollector(registry=self._collectors)
        self.gauge("build_info", "Always 1; the labels say what runs.", "version").of(__version__).set(1)
        self._certificate = self.gauge("tls_certificate_expiry_seconds", "Unix time when this certificate expires.")

    def counter(self, name: str, text: str, *labels: str) -> Series[Counter]:
        metric = Counter(f"slipstream_{name}", text, self._labels(labels), registry=self._collectors)
        return self._with_zero(Series(metric, self._fixed), labels)

    def add(self, collector: Collector) -> None:
        """Also show the metrics of ``collector``."""
        self._collectors.register(collector)

    def gauge(self, name: str, text: str, *labels: str) -> Series[Gauge]:
        return Series(Gauge(f"slipstream_{name}", text, self._labels(labels), registry=self._collectors), self._fixed)

    def histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Series[Histogram]:
        metric = Histogram(f"slipstream_{name}", text, self._labels(labels), registry=self._collectors,
                           buckets=tuple(buckets))
        return self._with_zero(Series(metric, self._fixed), labels)

    def tally(self, name: str, text: str, buckets: Iterable[int]) -> Tally:
        metric = Tally(f"slipstream_{name}", text, buckets, dict(zip(self._labels(()), self._fixed, strict=True)))
        self._collectors.register(metric)
        return metric

    def samples(self, families: Collection[str]) -> Counts:
        """The samples of ``families``, for ``show_external`` in another process of the same service."""
        self.settle()
        return [(family.name, [(sample.name, sample.labels, sample.value) for sample in family.samples])
                for family in self._collectors.collect() if family.name in families]

    def show_external(self, external: Counts) -> None:
        """Show samples of another process in place of our own."""
        fixed = dict(zip(self._labels(()), self._fixed, strict=True))
        self._collectors.external = {
            family: [Sample(name, {**labels, **fixed}, value) for name, labels, value in samples]
            for family, samples in external}

    def certificate_ends(self, at_s: float) -> None:
        self._certificate.of().set(at_s)

    def page(self, accept: str) -> tuple[str, bytes]:
        """(content type, body) of a scrape, in the form that the header ``accept`` asks for."""
        self.settle()
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self._collectors)

    def _with_zero(self, series: Series[M], labels: tuple[str, ...]) -> Series[M]:
        if not labels:
            series.of()
        return series

    def _labels(self, labels: tuple[str, ...]) -> list[str]:
        return ["service", "model", *labels]


MODES = ("speculate", "shadow", "plain")
# Values that labels begin with; what else comes is counted all the same.
KNOWN_TRANSITIONS = (("speculate", "shadow", "acceptance_low"), ("speculate", "shadow", "draft_timeout"),
                     ("speculate", "plain", "draft_unavailable"), ("speculate", "plain", "overload"),
                     ("shadow", "plain", "probe_failed"), ("shadow", "speculate", "probe_ok"),
                     ("plain", "speculate", "probe_ok"), ("plain", "speculate", "drafter_ready"))


class ModeMetrics:
    """Of one scope."""

    def __init__(self, registry: Registry, scope: Literal["pool", "session"]) -> None:
        self._scope = scope
        self._mode = registry.gauge("mode", "1 for the mode of new work, 0 for the other modes.", "scope", "mode")
        self._transitions = registry.counter("mode_transitions_total", "Changes of mode.", "scope", "from", "to",
                                             "reason").declare(*((scope, *change) for change in KNOWN_TRANSITIONS))

    def set_mode(self, mode: str) -> None:
        for name in MODES:
            self._mode.of(self._scope, name).set(1 if name == mode else 0)

    def changed(self, before: str, after: str, reason: str) -> None:
        self._transitions.of(self._scope, before, after, reason).inc()


STEP_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0,
                50.0)  # prompts of 8 billion weights on a CPU take the last ones
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
                 0.5, 1.0, 2.5)
FIRST_TOKEN_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
                       20.0, 40.0, 80.0)
LAG_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
WAIT_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
REQUEST_SECONDS = tuple(0.05 * 2**i for i in range(15))
ROWS = tuple(2**i for i in range(15))
NODES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (*range(17), 24, 32, 48, 64)
RATIOS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# Values that labels begin with; what else comes is counted all the same.
FAILURES = (*dict.fromkeys(kind for *_, kind in STATUS), "authentication_error", "cancelled")
FALLBACK_REASONS = ("acceptance_low", "draft_unavailable", "draft_timeout", "overload")
ENDINGS = ("stop", "length", "cancelled", "refused", "handed_back", "failed")
OUTCOMES = ("used", "prompt_lookup", "plain", "draft_missing", "discarded_late")
POSITIONS = tuple(str(depth) for depth in range(1, 5))
REFUSALS = ("queue", "late", "tokens", "target")
CROWDED = ("full", "address", "requests")  # requests: one is refused; else a connection is closed for others
MAX_TENANTS = 200  # tenants with series of their own
OTHERS = "others"  # the label of all further tenants


class VllmMetrics(Collector):
    """Counts of drafts in ended answers, under vLLM's names, for vLLM's benchmark, which reads them from the API's
    port."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._counts = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0)
        self._positions = Counted[int]()

    def answered(self, drafts: int, drafted: int, accepted: int, reached: Mapping[int, int]) -> None:
        """Count one answer. ``reached``: number of accepted draft tokens -> number of drafts with so many."""
        for name, count in zip(self._counts, (drafts, drafted, accepted), strict=True):
            self._counts[name] += count
        for length, count in reached.items():
            for position in range(length):
                self._positions[position] += count

    def collect(self) -> Iterator[Metric]:
        names, labels = ["model_name", "engine"], [self._model, "0"]
        for name, count in self._counts.items():
            family = CounterMetricFamily(f"vllm:spec_decode_num_{name}", "As vLLM counts them.", labels=names)
            family.add_metric(labels, count)
            yield family
        family = CounterMetricFamily("vllm:spec_decode_num_accepted_tokens_per_pos", "As vLLM counts them.",
                                     labels=[*names, "position"])
        for position, count in sorted(self._positions.items()):
            family.add_metric([*labels, str(position)], count)
        yield family


class RouterMetrics:
    """Requests as clients see them."""

    def __init__(self, model: str, as_vllm: bool = False) -> None:
        """as_vllm: also show counts of drafts under vLLM's names."""
        self.registry = registry = Registry("router", model)
        self.for_vllm = VllmMetrics(model) if as_vllm else None
        if self.for_vllm is not None:
            registry.add(self.for_vllm)
        self.mode = ModeMetrics(registry, "pool")
        self._requests = registry.counter("requests_total", "Requests that ended, by HTTP status.", "endpoint", "code",
                                          "mode")
        self._refused = registry.counter("requests_refused_total", "Requests refused with 429.", "tenant",
                                         "reason").declare(*((OTHERS, reason) for reason in REFUSALS))
        self._tenants = set[str]()
        self.failed = registry.counter("request_errors_total", "Requests that failed, by error type.",
                                       "type").declare(*zip(FAILURES)).inc
        self._in_flight = registry.gauge("requests_in_flight", "Answers that were admitted and have not ended.")
        self._queue = registry.gauge("queue_depth", "Answers that wait for admission.")
        self.finished = registry.histogram("request_duration_seconds", "From the arrival to the end of requests that "
                                           "succeeded.", REQUEST_SECONDS, "mode").observe
        self.first_token = registry.histogram("time_to_first_token_seconds", "From a request's arrival to its first "
                                              "token.", FIRST_TOKEN_SECONDS, "mode").observe
        self._between = registry.histogram("inter_token_latency_seconds", "Time between two commits of an answer, "
                                           "divided by the tokens of the second.", TOKEN_SECONDS, "mode")
        self._queue_wait = registry.histogram("queue_wait_seconds", "From a request's arrival to its admission.",
                                              WAIT_SECONDS)
        self._prompt = registry.counter("prompt_tokens_total", "Prompt tokens of admitted requests.")
        self._generated = registry.counter("generation_tokens_total", "Tokens of answers.", "mode")
        self._acceptance = registry.histogram("request_acceptance_ratio", "Share of an answer's verified draft tokens "
                                              "that were accepted.", RATIOS)
        self.fell_back = registry.counter("fallback_requests_total", "Answers that began without drafts, because the "
                                          "router had stopped speculation.",
                                          "reason").declare(*zip(FALLBACK_REASONS)).inc
        self._retries = registry.counter("retries_total", "Requests moved away from this target.", "peer")
        self.retry_refused = registry.counter("retry_budget_exhausted_total",
                                              "Retries refused: the retry budget was used up.").of().inc
        self._breaker = registry.gauge("breaker_state", "A target's circuit breaker: 0 closed, 1 half-open, 2 open.",
                                       "peer")
        self._ready = registry.gauge("targets_ready", "Targets that can take requests.")
        self.lag = registry.histogram("event_loop_lag_seconds", "How late the event loop runs what is due, "
                                      "sampled ten times a second.", LAG_SECONDS).of().observe
        self._connections = registry.gauge("http_connections", "HTTP connections: at_work (a whole request is being "
                                           "answered) or idle.", "state")
        self.connection_refused = registry.counter(
            "http_connections_refused_total", "Connections closed, or requests refused, for lack of room.",
            "reason").declare(*zip(CROWDED)).inc
        self.load(0, 0)

    def request(self, endpoint: str, code: int, mode: str) -> None:
        """Count an ended request. ``mode``: speculative or plain, as it began; none if it got no token."""
        self._requests.of(endpoint, str(code), mode).inc()

    def refused(self, tenant: str, reason: str) -> None:
        """Count a refused request. ``tenant``: a name that the operator chose, never a key. ``reason``: queue (it would
        wait too long), late (it waited too long), tokens (its quota of a minute) or target (targets have no room)."""
        if tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            tenant = OTHERS
        self._tenants.add(tenant)
        self._refused.of(tenant, reason).inc()

    def load(self, in_flight: int, queued: int) -> None:
        self._in_flight.of().set(in_flight)
        self._queue.of().set(queued)

    def admitted(self, waited_s: float, prompt_tokens: int) -> None:
        self._queue_wait.of().observe(waited_s)
        self._prompt.of().inc(prompt_tokens)

    def commit(self, seconds: float, tokens: int, mode: str) -> None:
        """A commit of ``tokens`` tokens came ``seconds`` after the commit before it."""
        self._between.of(mode).observe(seconds / max(tokens, 1))

    def answered(self, tokens: int, drafted: int, accepted: int, mode: str) -> None:
        self._generated.of(mode).inc(tokens)
        if drafted:
            self._acceptance.of().observe(accepted / drafted)

    def retried(self, peer: str) -> None:
        self._retries.of(peer).inc()

    def breaker(self, peer: str, state: int) -> None:
        self._breaker.of(peer).set(state)

    def targets(self, ready: int) -> None:
        self._ready.of().set(ready)

    def connections(self, idle: Callable[[], int], at_work: Callable[[], int]) -> None:
        """Set the functions that give the numbers of connections whenever metrics are read."""
        self._connections.of("idle").set_function(idle)
        self._connections.of("at_work").set_function(at_work)

    def target_known(self, peer: str) -> None:
        """Create the series of a target, even if it never answers."""
        self._retries.of(peer)
        self._breaker.of(peer)

    def target_forgotten(self, peer: str) -> None:
        self._retries.drop(peer)
        self._breaker.drop(peer)


# Families that vLLM's workers count in their own process, and that the target's process shows.
ENGINE_FAMILIES = frozenset(f"slipstream_{name}" for name in (
    "step_seconds", "step_rows", "mode_transitions", "wire_bytes", "drafter_lost", "invalid_growths", "stale_growths",
    "pairing_suspect", "drafter_tokens", "drafter_moves"))
MAX_DRAFTERS = 32  # drafter names with series of their own: drafters choose them
SETTLE_EVERY = 64  # pending steps and rounds that are then counted at once


def drained(queue: deque[Queued]) -> Iterator[Queued]:
    """Take items until none is left; other threads may add or take items meanwhile."""
    with suppress(IndexError):
        while True:
            yield queue.popleft()


class TargetMetrics:
    """Steps and rounds. ``accepted_tokens_total + bonus_tokens_total`` is the number of emitted tokens.

    Steps and rounds are counted when SETTLE_EVERY are pending or metrics are read: right after a step the processor's
    caches hold weights, and a counter takes ten times longer than in a loop. Equal rounds are counted together."""

    def __init__(self, model: str) -> None:
        self.registry = registry = Registry("target", model)
        self._pending_steps = deque[tuple[int, float, float, float]]()
        self._pending_rounds = deque[Sequence[tuple[int, int, str]]]()
        self._pending_verdicts, self._drafters = deque[tuple[str, int, int]](), set[str]()
        self._num_pending = 0  # steps and rounds that are not counted yet
        self._slot_counts: tuple[int, int, int] | None = None  # total, free, cached
        self._session_counts: tuple[int, int] | None = None  # running, waiting
        registry.settle = self._settle
        self.mode = ModeMetrics(registry, "session")
        self.request = registry.counter("answers_total", "Answers ended.", "outcome").declare(*zip(ENDINGS)).inc
        self._prompt = registry.counter("answer_prompt_tokens_total", "Prompt tokens of admitted answers.")
        self._cached = registry.counter("prefix_cache_hit_tokens_total", "Prompt tokens found in the prefix cache.")
        self._step = registry.histogram("step_seconds", "Time of a step, by phase.", STEP_SECONDS, "phase")
        self._rows = registry.histogram("step_rows", "Rows of a step: prompt tokens, roots, draft tokens.", ROWS)
        self._rounds = registry.counter("rounds_total", "Rounds, by where their draft tokens came from or why "
                                        "they had none.", "outcome").declare(*zip(OUTCOMES))
        self._drafts = registry.counter("drafts_total", "Rounds that verified at least one draft token.")
        self._draft_tokens = registry.counter("draft_tokens_total", "Draft tokens verified.")
        self._accepted = registry.counter("accepted_tokens_total", "Draft tokens that became part of an answer.")
        self._bonus = registry.counter("bonus_tokens_total", "Tokens that the target added itself, one a round.")
        self._position = registry.counter("accepted_tokens_per_position_total", "Accepted draft tokens, by "
                                          "depth in the tree.", "position").declare(*zip(POSITIONS))
        self._nodes = registry.tally("tree_nodes", "Draft tokens in one verification.", NODES)
        self._length = registry.tally("accepted_length", "Accepted draft tokens of one verification.", LENGTHS)
        self._slots = registry.gauge("kv_slots", "KV slots by state.", "state")
        self._sessions = registry.gauge("sessions", "Sessions by state.", "state")
        self.preempted = registry.counter("preemptions_total", "Sessions that lost their KV slots to others.").of().inc
        self._wire = registry.counter("wire_bytes_total", "Bytes between targets and drafts.", "direction")
        self.drafter_lost = registry.counter("drafter_lost_total", "Streams to drafts that ended.", "reason").declare(
            ("stopped",), ("closed",), ("unavailable",), ("overflow",)).inc
        self.invalid_growth = registry.counter("invalid_growths_total", "Invalid growths, which were refused.").of().inc
        self.stale_growth = registry.counter("stale_growths_total", "Growths that came too late to be used.").of().inc
        self.drafts_connected = registry.gauge("drafts_connected", "Draft streams that are up.").of().set
        self._suspect = registry.gauge("pairing_suspect", "1: the drafter is right only by chance.", "peer")
        self._lossy = registry.gauge("lossy", "1: accept thresholds are below 1, sampled answers may differ.")
        self._lenient = registry.counter("lenient_tokens_total", "Draft tokens accepted against the target's choice.")
        self._by_drafter = registry.counter("drafter_tokens_total", "Draft tokens verified and accepted, by who "
                                            "proposed them.", "drafter", "kind")
        self.moved = registry.counter("drafter_moves_total", "Answers that moved to another draft.").of().inc
        self._expected = registry.gauge("drafts_expected", "Drafts that the configuration or discovery lists.")
        self._full = registry.counter("device_full_total", "Steps that failed for lack of device memory.")
        self._shedding = registry.gauge("shedding_level", "Given up for memory: 1 half trees, 2 drafts, 3 new answers.")
        self.shedding(0)
        self.drafts_connected(0)  # so that alerts see a draft that never connects

    def engine_samples(self) -> Counts:
        """The samples of ``ENGINE_FAMILIES``; see ``Registry.samples``."""
        return self.registry.samples(ENGINE_FAMILIES)

    def prompt(self, tokens: int, cached: int) -> None:
        self._prompt.of().inc(tokens)
        self._cached.of().inc(cached)

    def step(self, rows: int, draft_wait_s: float, verify_s: float, host_s: float) -> None:
        self._pending_steps.append((rows, draft_wait_s, verify_s, host_s))
        self._count_pending()

    def rounds(self, rounds: Sequence[tuple[int, int, str]]) -> None:
        """Count the commits of one step: for each session its draft tokens, the accepted ones, and one of OUTCOMES."""
        self._pending_rounds.append(rounds)
        self._count_pending()

    def slots(self, total: int, free: int, cached: int) -> None:
        """Set the numbers of KV slots. ``cached``: slots of the prefix cache, which are given up when others are
        needed."""
        self._slot_counts = total, free, cached

    def sessions(self, running: int, waiting: int) -> None:
        self._session_counts = running, waiting

    def _count_pending(self) -> None:
        self._num_pending += 1
        if self._num_pending >= SETTLE_EVERY:
            self._num_pending = 0
            self._settle()

    def _settle(self) -> None:
        for rows, draft_wait_s, verify_s, host_s in drained(self._pending_steps):
            self._rows.of().observe(rows)
            self._step.of("draft_wait").observe(draft_wait_s)
            self._step.of("verify").observe(verify_s)
            self._step.of("host").observe(host_s)
        tokens = Counted[tuple[str, str]]()
        for drafter, drafted, accepted in drained(self._pending_verdicts):
            tokens[drafter, "drafted"] += drafted
            tokens[drafter, "accepted"] += accepted
        for labels, count in tokens.items():
            self._by_drafter.of(*labels).inc(count)
        self._count(Counted(round_ for step in drained(self._pending_rounds) for round_ in step))
        if self._slot_counts is not None:
            total, free, cached = self._slot_counts
            self._slots.of("used").set(total - free - cached)
            self._slots.of("cached").set(cached)
            self._slots.of("free").set(free)
        if self._session_counts is not None:
            self._sessions.of("running").set(self._session_counts[0])
            self._sessions.of("waiting").set(self._session_counts[1])

    def _count(self, rounds: Mapping[tuple[int, int, str], int]) -> None:
        for (drafted, accepted, outcome), count in rounds.items():
            self._rounds.of(outcome).inc(count)
            self._bonus.of().inc(count)
            if not drafted:
                continue
            self._drafts.of().inc(count)
            self._draft_tokens.of().inc(count * drafted)
            self._accepted.of().inc(count * accepted)
            self._nodes.add(drafted, count)
            self._length.add(accepted, count)
            for position in range(1, accepted + 1):
                self._position.of(str(position)).inc(count)

    def wire_bytes(self, direction: str, count: int) -> None:
        self._wire.of(direction).inc(count)

    def draft_forgotten(self, peer: str) -> None:
        self._suspect.drop(peer)

    def verified(self, drafter: str, drafted: int, accepted: int) -> None:
        if drafter not in self._drafters:
            if len(self._drafters) < MAX_DRAFTERS:
                self._drafters.add(drafter)
            else:
                drafter = "others"
        self._pending_verdicts.append((drafter, drafted, accepted))

    def pairing_suspect(self, peer: str, suspect: bool) -> None:
        self._suspect.of(peer).set(suspect)

    def lossy(self, lossy: bool) -> None:
        self._lossy.of().set(lossy)

    def lenient(self, tokens: int) -> None:
        if tokens:
            self._lenient.of().inc(tokens)

    def drafts_expected(self, count: int) -> None:
        self._expected.of().set(count)

    def shedding(self, level: int, full: bool = False) -> None:
        self._shedding.of().set(level)
        self._full.of().inc(full)


class DraftMetrics:
    """Sessions and growth of a draft service."""

    def __init__(self, model: str) -> None:
        self.registry = registry = Registry("draft", model)
        self.sessions_open = registry.gauge("sessions_open", "Sessions that the drafter holds.").of().set
        self.expired = registry.counter("session_expirations_total", "Sessions freed after silence, without a close.",
                                        "reason").of("lease").inc
        self._grow = registry.histogram("draft_seconds", "Time of one growth for a batch of sessions.", STEP_SECONDS)
        self._nodes = registry.counter("grown_nodes_total", "Draft tokens (tree nodes) grown.")
        self.committed = registry.counter("commits_total", "Commits that drafters processed.").of().inc
        self._wire = registry.counter("wire_bytes_total", "Bytes between targets and drafts.", "direction")
        self.invalid_item = registry.counter("invalid_items_total", "Invalid items, which were refused.").of().inc
        self.targets_connected = registry.gauge("targets_connected", "Target streams that are up.").of().set
        self.sessions_open(0)
        self.targets_connected(0)

    def grew(self, seconds: float, nodes: int) -> None:
        self._grow.of().observe(seconds)
        self._nodes.of().inc(nodes)

    def wire_bytes(self, direction: str, count: int) -> None:
        self._wire.of(direction).inc(count)
