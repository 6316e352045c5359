"""`python -m jdspark bench` at tiny shapes on a CPU: its rows, its arithmetic, its reader of profiles and its limits."""

import argparse
import dataclasses
import functools
import io
import itertools
import json
import re
import stat
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

from jdspark import StepOptions, cli, make_decode_step
from jdspark.bench import bookkeeping, clock, command, parts, report, whole_step
from jdspark.bench.bookkeeping import Carried, draw_ready, weights_of
from jdspark.bench.clock import Deadline, Figures, Variant, compile_all, measure
from jdspark.bench.floors import Bytes, copy_bandwidth, floor_us, part_bytes, step_bytes
from jdspark.bench.parts import PARTS, Job, Row, Run, jobs_of
from jdspark.bench.profile import DeviceEvent, Segment, segments_of
from jdspark.bench.scale import CPU, FULL, NO_CELL, QUICK, Cell, draw_inputs, draw_offsets, filled_state
from jdspark.bench.step_parts import PART_OPS, draw_part_operands, part_backends, part_function, why_no_part
from jdspark.presets import K3_RANK, SMALL_K3, TINY
from jdspark.state import split
from jdspark.step import kernel_shapes
from torch_bridge import bench as torch_bench
from torch_bridge import compare, largest_difference

pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="pins what happens on a CPU")

CELL = Cell(2, 48)
SMALL = dataclasses.replace(
    CPU,
    config=dataclasses.replace(TINY, num_hidden_layers=1),
    bookkeeping=(CELL,),
    acceptance=(CELL,),
    step=(Cell(1, 48),),
    every_step=(),
    parts=(Cell(1, 48),),
    bookkeeping_pages=24,
    copied_bytes=1 << 16,
    loop=2,
    rounds=2,
    calls=2,
    step_calls=2,
    sets=2,
)


def arguments(*extra):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(extra)


def test_every_row_is_there(tmp_path, capsys):
    """A whole run: what runs here has times, and what does not says why."""
    report_file, chart = tmp_path / "bench.json", tmp_path / "bench.png"
    assert command.run_bench(arguments("--json", str(report_file), "--plot", str(chart)), SMALL) == 0
    written = json.loads(report_file.read_text())
    rows = {(row["part"], row["name"]): row for row in written["rows"]}
    jax_names, torch_names = set(bookkeeping.BACKENDS), set(torch_bench.BOOKKEEPING)
    assert len(rows) == len(written["rows"]), "a row that comes again replaces the first look"
    assert not [row for row in written["rows"] if parts.FIRST_LOOK in row["note"]]
    expected = {(part, name) for part in ("bookkeeping", "bookkeeping and acceptance") for name in jax_names | torch_names}
    expected |= {("step", name) for name in {*whole_step.MAIN, *torch_bench.MAIN_STEPS}}
    expected |= {("part", f"{part}, {backend}") for part in PART_OPS for backend in part_backends(part)}
    assert set(rows) == expected | {("torch.compile", "all")}
    for (part, name), row in rows.items():
        runs = name in ("torch eager", "jax xla", "jax plain", "jax fused") or name.endswith(", xla")
        assert (row["wall_us"] is not None and row["wall_us"] > 0) == runs == (not row["left_out"]), (part, name)
        assert row["error"] == "", (part, name)
        assert row["device_us"] is row["kernel_us"] is row["launches"] is None, "no device, no device time"
        if part in ("step", "part"):
            assert row["floor_us"] == pytest.approx(row["bytes"] / written["machine"]["copy_bandwidth"] * 1e6)
    assert "interpreter" in rows["bookkeeping", "jax pallas"]["left_out"]
    assert written["machine"]["what"].startswith("CPU figures, of a tiny drafter: host time, no device time")
    assert written["machine"]["packages"]["jax"] == jax.__version__
    output = capsys.readouterr().out
    assert output.startswith("CPU figures")
    assert "whole step" in output
    looks = [line.split(" wall us")[0] for line in output.splitlines() if parts.FIRST_LOOK in line]
    assert looks == [f"step: B=1 context=48 {name}:" for name in ("jax plain", "jax fused", "torch eager")], "as they come"
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_a_part_that_raises_stops_no_other(monkeypatch, tmp_path, capsys):
    def broken(run):
        yield Row("first", "variant", 1, 2, 3, Figures(wall_us=1.0))
        raise RuntimeError("no such kernel")

    both = {"first": (0.5, broken), "second": (0.5, lambda run: iter([Row("second", "v", 1, 2, 3)]))}
    monkeypatch.setattr(command, "PARTS", both)
    monkeypatch.setattr(parts, "PARTS", both)
    args = arguments("--json", str(tmp_path / "bench.json"), "--parts", "first,second")
    assert command.run_bench(args, SMALL) == 1
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [(row["part"], row["name"], row["error"]) for row in rows] == [
        ("first", "variant", ""),
        ("first", "all", "RuntimeError: no such kernel"),
        ("second", "v", ""),
    ]
    assert "first: all: RuntimeError: no such kernel" in capsys.readouterr().out


def test_a_variant_that_raises_stops_no_other():
    calls = []

    def late():
        calls.append(None)
        if len(calls) == 3:
            raise ValueError("the third call")

    def never():
        raise TypeError("not built")

    wait = lambda _: None  # noqa: E731
    build = {
        "unbuilt": never,
        "late": lambda: Variant(late, wait),
        "sound": lambda: Variant(lambda: None, wait, steps=4, device_seconds=lambda calls: 8e-6 * calls, device_clock="events"),
    }
    figures = measure(build, rounds=3, calls=2, profiled_calls=0)
    assert figures["unbuilt"].error == "TypeError: not built"
    assert figures["late"].error == "ValueError: the third call"
    assert figures["late"].wall_us is None
    assert figures["sound"].device_us == pytest.approx(2.0), "of one of four steps"
    assert figures["sound"].device_clock == "events"
    assert figures["sound"].error == ""


@pytest.mark.parametrize(("seconds", "calls"), [(0.0004, 60), (0.002, 50), (0.5, 8)])
def test_a_slow_variant_is_called_less(monkeypatch, seconds, calls):
    """A call that is waited for says how many follow."""
    monkeypatch.setattr("jdspark.bench.clock.seconds_of", lambda call: call() or seconds)
    ran, asked = [], []
    variant = Variant(lambda: ran.append(None), lambda _: None, device_seconds=lambda some: asked.append(some) or 1.0)
    clock.in_turn({"one": variant}, {"one": Figures()}, rounds=2, calls=60, profiled_calls=0)
    assert asked == [calls, calls]
    assert len(ran) == 2 * (1 + 8 + 1 + 1 + calls), "one behind another variant's, for the dispatch, one, one and several"


def test_dispatch_is_the_hosts_part_of_a_call(monkeypatch):
    now = 0.0

    def passes(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(clock, "time", types.SimpleNamespace(perf_counter=lambda: now))
    variants = {
        "step": Variant(lambda: passes(0.001), lambda _: passes(0.004)),
        "loop": Variant(lambda: passes(0.001), lambda _: passes(0.004), steps=2, one_dispatch=True),
    }
    figures = {name: Figures() for name in variants}
    clock.in_turn(variants, figures, rounds=3, calls=5, profiled_calls=0)
    assert (figures["step"].dispatch_us, figures["step"].wall_us) == (pytest.approx(1000), pytest.approx(1000))
    assert figures["loop"].dispatch_us is None, "a call is more than a step"


def test_figures_of_a_profile_are_per_step(monkeypatch):
    """One variant with a flush ahead of each call, one whose calls are loops of many steps, one that the profile lost."""
    wait, ran = lambda _: None, []
    build = {
        "part": lambda: Variant(lambda: ran.append("part"), wait, skip=1, note="copies the pool"),
        "loop": lambda: Variant(lambda: ran.append("loop"), wait, steps=5, one_dispatch=True),
        "lost": lambda: Variant(lambda: ran.append("lost"), wait),
    }

    def profiled(runs, calls, wait):
        ran.clear()
        for run in runs:
            run()
        assert ran == ["part"] * 4 + ["loop"] + ["lost"] * 4, "a loop is called once"
        kernels = [DeviceEvent(100.0 * call + start, length, "k", False) for call in range(4) for start, length in flushed]
        return [Segment(kernels, 4, 4), Segment(kernels[:10], 1, 0), Segment([], 0, 0)]

    flushed = ((0, 50), (50, 6), (60, 10))
    monkeypatch.setattr("jdspark.bench.clock.profile_calls", profiled)
    figures = measure(build, rounds=1, calls=1, profiled_calls=4)
    part, loop, lost = (figures[name] for name in build)
    assert (part.device_us, part.device_clock) == (pytest.approx(0.020), "profile")
    assert part.kernel_us == pytest.approx(0.016)
    assert (part.launches, part.graph_launches, part.loose_launches) == (2, 1, 0), "the flush is not the part's"
    assert (loop.device_us, loop.device_clock) == (loop.wall_us, "loop")
    assert (loop.launches, loop.graph_launches, loop.loose_launches) == (2, 0.2, 0)
    assert lost.note == "the profile has nothing of it"
    assert lost.wall_us > 0

    def unreadable(runs, calls, wait):
        raise RuntimeError("the trace has 0 marked segments, expected 3")

    monkeypatch.setattr("jdspark.bench.clock.profile_calls", unreadable)
    figures = measure(build, rounds=1, calls=1, profiled_calls=4)
    assert figures["loop"].device_us == figures["loop"].wall_us > 0
    assert figures["part"].note.startswith("copies the pool; no profile: RuntimeError: the trace has 0 marked segments")
    assert figures["part"].failed
    assert not lost.failed


def test_a_function_that_does_not_compile_is_an_exception_in_its_place():
    add = jax.jit(lambda x: x + 1)

    def refused():
        raise ValueError("not traced")

    compiled = compile_all({"good": lambda: add.lower(1), "bad": refused})
    assert compiled["good"](1) == 2
    assert str(compiled["bad"]) == "not traced"


def test_the_first_is_compiled_alone():
    events = []

    class Lowered:
        def __init__(self, name):
            self.name = name

        def compile(self):
            events.append(f"{self.name} begins")
            time.sleep(0.05)
            events.append(f"{self.name} ends")

    compile_all({name: functools.partial(Lowered, name) for name in "abc"}, first_alone=True)
    assert events[:2] == ["a begins", "a ends"]
    assert sorted(events[2:4]) == ["b begins", "c begins"], "and the others side by side"


def test_bytes_of_the_parts_by_hand():
    """Numbers small enough to count: one layer, two heads."""
    config = dataclasses.replace(
        K3_RANK, num_hidden_layers=1, hidden_size=10, num_attention_heads=2, q_lora_rank=3, kv_lora_rank=4,
        qk_nope_head_dim=5, qk_rope_head_dim=2, v_head_dim=6, intermediate_size=7, num_target_layers=2, target_hidden_size=11,
        markov_rank=2, block_size=None,
    )  # fmt: skip
    of = part_bytes(config, B=2, K=3, context=100, columns=9, vocab=13, itemsize=2)
    assert of["accept"] == Bytes(operands=2 * 4 * 13 * 4)
    assert of["prepare"] == Bytes(operands=2 * 9 * (4 + 4) + 2 * 10 * (2 + 1 + 6))
    assert of["context projection"] == Bytes(weights=2 * (10 * 22 + 10), operands=2 * 8 * 22)
    kv_a = 6 * 10 + 4  # the product's rows of latent, and the norm
    assert of["context latents"] == Bytes(weights=2 * kv_a)
    assert of["block latents"] == Bytes(again=2 * kv_a)
    assert of["store"] == Bytes(operands=2 * (8 * 6 * 2))
    assert of["query"] == Bytes(weights=2 * (10 + 3 * 10 + 3 + 2 * 7 * 3 + 2 * 5 * 4))
    assert of["attention"] == Bytes(latents=2 * 2 * 100 * 6)
    assert of["attention output"] == Bytes(weights=2 * (2 * 6 * 4 + 10 * 12))
    assert of["mlp"] == Bytes(weights=2 * (10 + 3 * 7 * 10))
    assert of["lm_head"] == Bytes(weights=2 * (10 + 13 * 10), operands=2 * 3 * 13 * (2 + 4))
    assert of["markov chain"] == Bytes(weights=2 * 3 * 13 * 2, operands=2 * (2 * 3 * 13 * 4)), "w2 once per slot"
    assert of["block write"] == Bytes(operands=2 * (6 * 6 * 2))
    assert of["next tokens"] == Bytes(operands=4 * (8 + 6 + 8))
    assert of["whole context"] == Bytes(operands=2 * 8 * 22, again=2 * (10 * 22 + 10 + kv_a))
    in_layers = ("query", "attention", "attention output", "mlp")
    assert of["all layers"] == Bytes(again=sum(of[part].total for part in in_layers) + 2 * (kv_a + 10)), "and the last norm"
    assert list(of) == list(PART_OPS)
    weights = sum(part.weights for part in of.values())
    assert step_bytes(of) == weights + of["attention"].latents
    assert of["block latents"].total == 2 * kv_a, "its own floor counts what it reads again"


def test_parts_take_the_kernels_of_whole_ops(monkeypatch):
    """On Pallas: or what is timed would be XLA's products."""
    config = dataclasses.replace(
        SMALL_K3, num_hidden_layers=1, q_lora_rank=64, qk_nope_head_dim=64, v_head_dim=64, target_hidden_size=64
    )
    scale = dataclasses.replace(FULL, config=config, vocab=config.vocab_size)
    geometry = scale.geometry(Cell(1, 64))
    params = scale.drafter(0)
    state, rng = filled_state(scale, geometry), np.random.default_rng(0)
    operands = draw_part_operands(rng, scale, geometry, 1, params, state)
    shapes = kernel_shapes(params, scale.config, geometry, 1)
    many = kernel_shapes(params, scale.config, scale.geometry(Cell(40, 64)), 40)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("jdspark.ops.backends.why_unavailable", lambda backend: None)
    for part, launches in {"lm_head": 1, "whole context": 2, "all layers": 9}.items():
        assert not why_no_part(part, "pallas", shapes)
        assert "its kernels are for up to 256" in why_no_part(part, "pallas", many)
        function = part_function(part, scale, geometry, "pallas")
        text = jax.jit(function).trace(operands).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("@mosaic_gpu_v2") == launches, part
        assert "stablehlo.dot_general" not in text, part
    assert not any(why_no_part(part, "pallas", many) for part in ("accept", "attention", "markov chain"))
    assert not any(why_no_part(part, "triton", many) for part in PART_OPS)


def test_the_floor_of_one_rank_of_k3():
    """About 0.36 ms at 2K and 4.3 TB/s: the design's figure; each further token of context costs 5 layers of 576 numbers."""
    sizes = {"B": 1, "K": 7, "columns": 66, "vocab": 20480, "itemsize": 2}
    short, long = (step_bytes(part_bytes(K3_RANK, context=context, **sizes)) for context in (2048, 393216))
    assert floor_us(short, 4.3e12) == pytest.approx(357.4, abs=0.1)
    assert long - short == (393216 - 2048) * 5 * 576 * 2


@pytest.mark.parametrize(("few", "many"), [(1.5, 3.5), (3.5, 3.0)], ids=["without the host's part", "a clock that cannot tell"])
def test_the_bandwidth_counts_both_directions(monkeypatch, few, many):
    seconds = iter([few, many])
    monkeypatch.setattr("jdspark.bench.floors.median_seconds", lambda call, rounds: next(seconds))
    assert copy_bandwidth(1 << 20) == 20 * 2 * (1 << 20) / 2.0


def event(name, start, duration, names, graph=None):
    number = names.setdefault(name, len(names) + 1)
    stats = "" if graph is None else f"stats {{ metadata_id: 1 uint64_value: {graph} }}"
    return f"events {{ metadata_id: {number} offset_ps: {int(start * 1000)} duration_ps: {int(duration * 1000)} {stats} }}"


def plane(name, lines):
    """Text of a plane; `lines` maps a line's name to (event name, start ns, duration ns, graph id or None)."""
    names = {}
    text = "".join(
        f'lines {{ name: "{line}" {" ".join(event(*e[:3], names, *e[3:]) for e in events)} }} '
        for line, events in lines.items()
    )
    metadata = "".join(f'event_metadata {{ key: {n} value {{ id: {n} name: "{name}" }} }} ' for name, n in names.items())
    return f'planes {{ name: "{name}" {text} {metadata} stat_metadata {{ key: 1 value {{ id: 1 name: "cuda_graph_id" }} }} }}'


def read(*planes):
    return segments_of(ProfileData.from_text_proto("\n".join(planes)))


KERNELS = [
    ("before", 0, 5), ("sort_1", 10, 1),
    ("a", 20, 2), ("b", 25, 3), ("a", 40, 2), ("b", 46, 4), ("a", 60, 2), ("b", 65, 5),
    ("sort_1", 80, 1), ("copy", 90, 7),
]  # fmt: skip


def test_kernels_and_spans_of_a_profile():
    """Three calls of two kernels and one of a copy; streams are merged, other lines left out."""
    first, second = KERNELS[:5], KERNELS[5:]
    segments = read(plane("/device:GPU:0", {"Stream #1": first, "Stream #2": second, "XLA Ops": [("fusion", 21, 50)]}))
    assert [[e.name for e in segment.events] for segment in segments] == [["a", "b"] * 3, ["copy"]]
    calls, copy = segments
    assert calls.kernel_us(3) == pytest.approx((2 + 3 + 2 + 4 + 2 + 5) / 3 / 1e3)
    assert calls.launches(3) == 2
    assert calls.span_us(3) == pytest.approx(0.010), "the median of 8, 10 and 10 ns, the gaps inside a call included"
    assert calls.span_us(3, skip=1) == pytest.approx(0.004), "of b alone"
    assert [e.name for e in calls.without_head(3, 1).events] == ["b"] * 3
    assert calls.span_us(4) is None, "six kernels are not four equal calls"
    assert calls.without_head(3, 1).loose == 3
    assert calls.without_head(4, 1).events == []
    assert copy.kernel_us(1) == pytest.approx(0.007)
    assert calls.graphs == 0
    assert calls.loose == 6
    sorting = [(name.replace("copy", "void cub::sort<int>"), *rest) for name, *rest in KERNELS]
    assert [len(segment.events) for segment in read(plane("/device:GPU:0", {"Stream #1": sorting}))] == [6, 1]


def test_graphs_of_a_profile():
    """Torch's graph by its launch; XLA's by the span in which the profiler makes it run kernel by kernel; or launched."""
    graphed = [e if e[0] in ("sort_1", "before") else (*e, 0 if e[1] == 65 else 9) for e in KERNELS]
    torch_calls = {"python": [("cudaGraphLaunch", 12, 9), ("cuGraphLaunch", 13, 5), ("cuGraphLaunch#id=3", 35, 5)]}
    calls, copy = read(plane("/device:GPU:0", {"Stream #1": graphed}), plane("/host:CPU", torch_calls))
    assert (calls.graphs, calls.loose) == (2, 1)
    assert (copy.graphs, copy.loose) == (0, 0)

    spans = [
        ("WARNING: CommandBuffer disabled when profiling", 14, 4),
        ("WARNING: CommandBuffer disabled when profiling", 30, 4),
    ]
    launches = [("cuLaunchKernelEx", time, 1) for time in (12, 14, 15, 31, 33, 50)]
    host = plane("/host:CPU", {"thread": spans, "driver": launches})
    calls, copy = read(plane("/device:GPU:0", {"Stream #1": KERNELS}), host)
    assert (calls.graphs, calls.loose) == (2, 2)
    calls, _ = read(plane("/device:GPU:0", {"Stream #1": KERNELS}), plane("/host:CPU", {"thread": spans}))
    assert (calls.graphs, calls.loose) == (2, None), "without the driver's calls nobody can tell"

    executed = {"thread": [("command_buffer::execute#device=0#", 14, 4)], "driver": [("cuGraphLaunch", 15, 1)]}
    calls, _ = read(plane("/device:GPU:0", {"Stream #1": graphed}), plane("/host:CPU", executed))
    assert (calls.graphs, calls.loose) == (1, 1), "one graph, seen by XLA and by the driver"


@pytest.fixture(scope="module")
def drawn():
    """Drafter, geometry, state and operands of a cell."""
    geometry = SMALL.geometry(CELL, SMALL.bookkeeping_pages)
    params, state = SMALL.drafter(0), filled_state(SMALL, geometry)
    sets = [draw_ready(np.random.default_rng(seed), SMALL, geometry, CELL.B) for seed in range(2)]
    return params, geometry, state, sets


@pytest.mark.parametrize("acceptance", [False, True])
def test_the_loop_runs_every_step_of_the_bookkeeping(drawn, acceptance):
    """What the steps leave one after the other, in every bit but for norm/rope; and torch is asked for the same work."""
    params, geometry, state, sets = drawn
    weights = weights_of(params, state)
    body = functools.partial(bookkeeping.bookkeeping, scale=SMALL, geometry=geometry, backend="xla", acceptance=acceptance)
    state = dataclasses.replace(state, ctx_len=jnp.array([20, 30, 0], jnp.int32))
    steps, reads, torch_state = split(state)[0], [], torch_bench.torch_state(state)
    for ready in sets * 2:
        steps, read = body(steps, ready, weights)
        theirs = torch_bench.bookkeeping_step(
            torch_bench.as_shared(params), torch_state, torch_bench.as_shared(ready), fused=False, acceptance=acceptance, K=7
        )
        assert all(compare(a, b) for a, b in zip(theirs, read, strict=True))
        reads.append(read)
    assert compare(torch_state.ctx_len, steps.ctx_len)
    assert largest_difference(torch_state.pool, steps.pool) < 2e-5
    compiled = bookkeeping.lowered(SMALL, geometry, state, sets, weights, backend="xla", acceptance=acceptance).compile()
    looped, last = compiled(split(jax.tree.map(jnp.copy, state))[0], sets, weights)
    assert compare(looped.ctx_len, steps.ctx_len)
    assert largest_difference(looped.pool, steps.pool) < 2e-5
    assert compare(looped.pool != state.pool, steps.pool != state.pool)
    for ours, theirs in zip(jax.tree.leaves(last), jax.tree.leaves(reads[2:]), strict=True):
        assert compare(ours, theirs)
    assert int(steps.ctx_len[0]) > 20, "and it did move"


def test_nothing_leaves_the_loop(drawn):
    """The page tables depend on operands alone, the mask row on weights: both must still be read inside the loop's body."""
    params, geometry, state, sets = drawn
    compiled = bookkeeping.lowered(
        SMALL, geometry, state, sets, weights_of(params, state), backend="xla", acceptance=False
    ).compile()
    text = compiled.as_text()
    assert " while(" in text
    entry = text[text.index("ENTRY ") :]
    assert f"s32[{CELL.B},{geometry.max_blocks_per_seq}]" in text.replace(entry, "")
    assert "divide" in text.replace(entry, "")
    read = [name for operands in re.findall(r"(?:fusion|copy)\(([^)]*)\)", entry) for name in operands.split(", ")]
    assert not [name for name in read if re.match("%(state|sets|weights)_", name)], "around the loop nothing reads an operand"


def test_lengths_stay_at_the_context(drawn):
    """However many steps are timed: the context does not grow and no page is missing."""
    params, geometry, state, sets = drawn
    body = functools.partial(bookkeeping.bookkeeping, scale=SMALL, geometry=geometry, backend="xla", acceptance=True)
    after, read = body(split(state)[0], sets[0], weights_of(params, state))
    assert after.ctx_len.tolist() == [48, 48, 0]
    assert read[4].tolist() == [48, 48], "advertised"
    assert int(read[3].min()) >= 0


def test_the_loop_of_whole_steps(drawn):
    """Three steps in one dispatch are three steps of the public call, bit for bit."""
    scale, params = SMALL, drawn[0]
    geometry = scale.geometry(Cell(1, 48))
    inputs = draw_inputs(np.random.default_rng(0), scale, geometry, 1)
    state = dataclasses.replace(filled_state(scale, geometry), ctx_len=jnp.array([9, 0], jnp.int32))
    loop = whole_step.lowered_loop(3, StepOptions(), params, state, inputs).compile()
    changing, outputs = loop(params, *split(jax.tree.map(jnp.copy, state)), inputs)
    step = make_decode_step(scale.config, geometry)
    carried = Carried(state)
    for _ in range(3):
        expected, carried.state = step(params, carried.state, inputs)
    for ours, theirs in zip(jax.tree.leaves((changing, outputs)), jax.tree.leaves((split(carried.state)[0], expected))):
        assert compare(ours, theirs)


def test_the_timed_loop_and_the_calls_take_all_sets_in_turn(drawn):
    params, _, state, _ = drawn
    seen = {"loop": [], "step": []}

    def loop(params, changing, constant, inputs):
        seen["loop"].append(inputs)
        return changing, None

    def step(params, state, inputs):
        seen["step"].append(inputs)
        return None, state

    timed = whole_step.variant(None, loop, 3, step, params, Carried(state), ["a", "b", "c"])
    assert timed.device_seconds(1) is not None
    for _ in range(2):
        timed.run()
    assert "".join(seen["loop"]) == "abcab", "one ahead of all, one ahead of the timed, one by itself, two"
    assert seen["step"] == ["c", "a"]


def test_what_a_row_of_calls_has_at_its_ends_is_in_no_call():
    row = lambda calls: 0.5 + calls * 0.25  # noqa: E731
    assert clock.seconds_per_call(1, row(1), 9, row(9)) == 0.25
    assert clock.seconds_per_call(1, 3.0, 4, 2.0) == 0.5, "a hiccup in the shorter row"


def test_a_loop_has_fewer_steps_where_each_gathers_a_long_context():
    of = functools.partial(whole_step.loop_steps, FULL)
    pallas = StepOptions(backend="pallas")
    assert [of(StepOptions(), FULL.geometry(cell)) for cell in (Cell(4, 2048), Cell(8, 2048), Cell(1, 131072))] == [100, 25, 12]
    assert [of(pallas, FULL.geometry(cell)) for cell in (Cell(1, 2048), Cell(32, 2048), Cell(1, 393216))] == [100] * 3


def test_the_hosts_part_of_a_call_is_not_device_time(monkeypatch):
    monkeypatch.setattr(whole_step, "seconds_of", lambda call: call())
    assert whole_step.loop_seconds(lambda times: 0.5 + times * 0.25) == 0.25


def test_offsets_share_no_page_that_a_step_writes():
    rng = np.random.default_rng(0)
    for num_pages in (40, 400):
        geometry = SMALL.geometry(Cell(5, 200), num_pages)
        pages = draw_offsets(rng, geometry, 5)[0, :, 0] // geometry.offset_divisor
        assert pages.min() >= 0
        assert pages.max() < num_pages
        tail = pages[:, -3:]
        assert len(np.unique(tail)) == tail.size
        assert not np.isin(pages[:, :-3], tail).any()
        assert (len(np.unique(pages)) == pages.size) == (num_pages == 400)


def test_accepted_prefixes_vary():
    geometry = SMALL.geometry(Cell(4, 48))
    counts = set()
    for seed in range(8):
        inputs = draw_inputs(np.random.default_rng(seed), SMALL, geometry, 4)
        best = np.asarray(inputs.logits).argmax(1).reshape(4, 8)[:, :7]
        counts |= set(np.cumprod(best == np.asarray(inputs.draft_tokens), axis=1).sum(axis=1).tolist())
    assert counts == set(range(8))


def test_full_and_quick_scales():
    """Every batch and context of the issue's table; pools whose elements a 32-bit index reaches."""
    assert {(cell.B, cell.context) for cell in FULL.bookkeeping} == {
        (B, context) for B in (1, 4, 32) for context in (2048, 32768, 65536, 98304, 131072, 393216)
    }
    assert {cell.context for cell in FULL.step if cell.B == 1} == {2048, 32768, 65536, 98304, 131072, 393216}
    assert {cell.B for cell in FULL.step} == {1, 4, 8, 16, 32}
    assert sorted(FULL.compiled) == sorted(FULL.bookkeeping)
    assert [cell.B for cell in FULL.bookkeeping[:3]] == [1, 4, 32], "a short limit reaches every batch size"
    assert {cell.B for cell in (*QUICK.bookkeeping, *QUICK.step)} == {1}
    for cell in (*FULL.step, *FULL.parts):
        assert FULL.geometry(cell).num_pages * 32 * 5 * 576 < 2**31
    assert abs(sum(share for share, _ in PARTS.values()) - 1) < 1e-9


def test_without_time_the_rows_say_so():
    """What needs longer than is left is not begun; the first piece is."""
    scale = dataclasses.replace(SMALL, bookkeeping=(CELL,) * 2, rounds=1)
    run = Run(scale, False, 1e9, 0, Deadline(0.0))
    rows = list(parts.bookkeeping_rows(run, scale.bookkeeping))
    assert {row.name: row.left_out for row in rows}["jax xla"] == parts.NO_TIME
    assert all(row.left_out for row in rows)
    for function in (lambda run: parts.bookkeeping_rows(run, scale.bookkeeping), parts.part_rows):
        deadline = Deadline(60.0)  # which is over when it is the job's turn
        run = Run(scale, False, 1e9, 0, deadline, lambda deadline=deadline: deadline.restart(0.0))
        assert all(row.left_out for row in function(run))
    pace = parts.Pace(Deadline(100.0))
    assert pace.fits()


def fake_python(tmp_path, script):
    """An executable in Python's place that runs a shell script."""
    file = tmp_path / "python"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


JOB = Job("step", SMALL, Cell(1, 2048))


def test_a_job_in_its_own_process(tmp_path, monkeypatch, capsys):
    """Rows come as they are printed, behind the job's turn; a crash, or no end, becomes a row."""
    row = Row("step", "jax plain", 1, 2048, 66, Figures(device_us=3.5, wall_us=4.0), bytes=10, floor_us=2.0)
    assert row.ratio == 1.75
    assert report.shown(dataclasses.replace(row, floor_us=0.4))["ratio"] == "-"
    line = command.TAG + json.dumps(row.to_json())
    script = f"echo 'a warning'\necho {command.READY}\nread seconds\necho $seconds > {tmp_path}/turn\necho '{line}'\nexit 3"
    monkeypatch.setattr(command.sys, "executable", fake_python(tmp_path, script))
    first, last = command.run_jobs(arguments(), [JOB], 1e9, Deadline(5.0), together=1)
    assert first == row
    assert (last.part, last.B, last.context, last.figures.error) == (
        "step", 1, 2048, "RuntimeError: exit status 3: a warning",
    )  # fmt: skip
    assert 0 < float((tmp_path / "turn").read_text()) < 5
    assert "a warning" in capsys.readouterr().out

    script = f"echo '{line}'\nexit 1"  # ends before its turn
    monkeypatch.setattr(command.sys, "executable", fake_python(tmp_path, script))
    first, last = command.run_jobs(arguments(), [JOB], 1e9, Deadline(5.0), together=1)
    assert first == row
    assert last.figures.error == "RuntimeError: exit status 1:"

    monkeypatch.setattr(command, "GRACE", 0.0)
    script = f"echo {command.READY}\nread seconds\necho '{line}'\nsleep 60 & sleep 60"
    monkeypatch.setattr(command.sys, "executable", fake_python(tmp_path, script))
    first, last = command.run_jobs(arguments(), [JOB], 1e9, Deadline(0.5), together=1)
    assert first == row
    assert (last.left_out, last.figures.failed) == (command.ENDED, False)
    script = f"echo '{line}'\necho {command.READY}\nsleep 60 & sleep 60"
    monkeypatch.setattr(command.sys, "executable", fake_python(tmp_path, script))
    found = list(command.run_jobs(arguments(), [JOB] * 2, 1e9, Deadline(0.5), together=2))
    assert found[0] == found[2] == row, "of the second job as well, whose turn never came"
    assert [found[1].left_out, found[3].left_out] == [command.ENDED, parts.NO_TIME]
    (row,) = command.run_jobs(arguments(), [JOB], 1e9, Deadline(0.0), together=1)
    assert row.left_out == parts.NO_TIME


def test_jobs_prepare_side_by_side_and_measure_in_turn(tmp_path, monkeypatch):
    log = tmp_path / "log"
    number = '"$5"'  # of `-m jdspark bench --only-job NUMBER`
    script = f"echo prepared {number} >> {log}\necho $JAX_COMPILATION_CACHE_DIR >> {tmp_path}/cache\n"
    script += f"echo {command.READY}\nread seconds\necho begin {number} >> {log}\nsleep 0.2\n"
    monkeypatch.setattr(command.sys, "executable", fake_python(tmp_path, script + f"echo end {number} >> {log}"))
    assert not list(command.run_jobs(arguments(), [JOB] * 3, 1e9, Deadline(20.0), together=2))
    lines = log.read_text().splitlines()
    assert set(lines[:2]) == {"prepared 0", "prepared 1"}
    assert lines[2:] == ["begin 0", "end 0", "begin 1", "end 1", "prepared 2", "begin 2", "end 2"]
    caches = (tmp_path / "cache").read_text().splitlines()
    assert caches == [caches[0]] * 3, "what one job tuned, the next knows"
    assert "jdspark-bench-" in caches[0]
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "of the user")
    list(command.run_jobs(arguments(), [JOB], 1e9, Deadline(20.0), together=1))
    assert (tmp_path / "cache").read_text().splitlines()[-1] == "of the user"


def test_variants_that_a_scale_leaves_out():
    scale = dataclasses.replace(SMALL, steps_left_out=frozenset(whole_step.MAIN) - {"jax plain"}, rounds=1)
    rows = list(parts.step_rows(Run(scale, False, 1e9, 0, Deadline(60.0))))
    of_jax = {row.name: row for row in rows if row.name.startswith("jax")}
    assert set(of_jax) == set(whole_step.MAIN)
    assert [name for name, row in of_jax.items() if not row.left_out] == ["jax plain"]
    assert of_jax["jax fused"].left_out == parts.LONG_TO_TRACE
    assert of_jax["jax plain"].figures.wall_us > 0
    assert QUICK.steps_left_out == {"jax fused, pallas"}


def test_a_part_that_a_kernel_refuses_has_a_row_that_says_so(monkeypatch):
    monkeypatch.setattr(parts, "PART_OPS", {"lm_head": PART_OPS["lm_head"], "next tokens": PART_OPS["next tokens"]})
    monkeypatch.setattr(parts, "part_backends", lambda part: ["xla"])
    monkeypatch.setattr(parts, "why_no_part", lambda part, backend, shapes: "too many rows" if part == "lm_head" else "")
    traced, trace_all = [], parts.trace_all

    def noting(functions):
        traced.extend(functions)
        return trace_all(functions)

    monkeypatch.setattr(parts, "trace_all", noting)
    rows = {row.name: row for row in parts.part_rows(Run(dataclasses.replace(SMALL, rounds=1), False, 1e9, 0, Deadline(60.0)))}
    assert rows["lm_head, xla"].left_out == "too many rows"
    assert rows["next tokens, xla"].figures.wall_us > 0
    assert traced == ["next tokens, xla"]


def test_the_steps_rows_are_long(monkeypatch):
    """What the first call takes until the device begins is in the time of all."""
    counts, in_turn = [], clock.in_turn

    def counting(*args, calls, **kwargs):
        counts.append(calls)
        in_turn(*args, calls=calls, **kwargs)

    monkeypatch.setattr(parts, "in_turn", counting)
    left_out = frozenset(whole_step.MAIN) - {"jax plain"}
    scale = dataclasses.replace(SMALL, rounds=1, calls=2, step_calls=3, steps_left_out=left_out)
    list(parts.step_rows(Run(scale, False, 1e9, 0, Deadline(60.0))))
    assert set(counts) == {3}


@pytest.mark.parametrize(
    ("instruction", "copies"),
    [
        ("%copy.1 = bf16[5,2112,32,576]{3,2,1,0} copy(%parameter.1)", True),
        ("%copy.1 = bf16[10560,32,288,2]{3,2,1,0:T(8,128)} copy(%bitcast)", True),
        ("%s = (bf16[5,2112,32,576]{3,2,1,0}, bf16[5,2112,32,576]{3,2,1,0}, u32[]) copy-start(%parameter.1)", True),
        ("%copy.1 = bf16[5,2112,32,575]{3,2,1,0} copy(%parameter.1)", False),
        ("%copy.1 = u16[5,2112,32,576]{3,2,1,0} copy(%parameter.1)", False),
        ("%copy.1 = bf16[] copy(%parameter.1)", False),
        ("%fusion = bf16[5,2112,32,576]{3,2,1,0} fusion(%copy), kind=kLoop, calls=%copy(1)", False),
    ],
)
def test_a_copy_of_the_pool_is_noted(instruction, copies):
    class Compiled:
        text = f'ENTRY %main {{\n  {instruction}, metadata={{op_name="copy"}}\n}}'

        def as_text(self):
            return self.text

    pool = jax.ShapeDtypeStruct((5, 2112, 32, 576), jnp.bfloat16)
    assert bookkeeping.copies_pool(Compiled(), pool) == ("copies the pool, 0.4 GB" if copies else "")
    assert not bookkeeping.copies_pool(Compiled(), jax.ShapeDtypeStruct((5, 2111, 32, 576), jnp.bfloat16)), "a part of it"
    assert not bookkeeping.copies_pool(Compiled(), jax.ShapeDtypeStruct((5, 2112, 32, 576), jnp.float8_e4m3fn))
    Compiled.text = Compiled.text.replace("2112", "21").replace("10560", "105")
    assert not bookkeeping.copies_pool(Compiled(), jax.ShapeDtypeStruct((5, 21, 32, 576), jnp.bfloat16)), "too small"
    Compiled.text = None
    assert not bookkeeping.copies_pool(Compiled(), pool)


def test_a_copy_of_the_pool_is_noted_in_an_executable(monkeypatch):
    """As XLA writes it: without donation the pool is copied, with it it is not."""
    monkeypatch.setattr(bookkeeping, "LARGE_POOL", 0)
    pool = jnp.zeros((2, 30, 8, 16), jnp.float32)
    for donated in ((), (0,)):
        compiled = jax.jit(lambda pool: pool.at[0, 0].set(1.0), donate_argnums=donated).lower(pool).compile()
        assert bool(bookkeeping.copies_pool(compiled, pool)) == (not donated)


def test_the_note_reaches_the_row(monkeypatch):
    for module in (bookkeeping, whole_step):
        monkeypatch.setattr(module, "copies_pool", lambda compiled, pool: f"a copy of {pool.ndim} dimensions")
    scale = dataclasses.replace(SMALL, rounds=1, step_loop=2, steps_left_out=frozenset(whole_step.MAIN) - {"jax plain"})
    run = Run(scale, False, 1e9, 0, Deadline(60.0))
    for rows in (parts.bookkeeping_rows(run, scale.bookkeeping), parts.step_rows(run)):
        notes = [row.figures.note for row in rows if row.name in ("jax xla", "jax plain")]
        assert notes[-1] == "a copy of 4 dimensions"


def logged(monkeypatch, log, module, name, label):
    """The function writes its label into the log, and runs."""
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: log.append(label) or original(*args, **kwargs))


def test_jax_alone_is_timed_before_torch_has_run(monkeypatch):
    """Of all cells that share a process; by the same clock as in turn."""
    log = []
    logged(monkeypatch, log, bookkeeping, "variant", "jax")
    logged(monkeypatch, log, torch_bench, "bookkeeping_variant", "torch")
    monkeypatch.setattr(parts, "BACKENDS", {"jax xla": "xla"})
    cells = (CELL, Cell(1, 48))
    rows = list(parts.bookkeeping_rows(Run(dataclasses.replace(SMALL, profiled_calls=0), True, 1e9, 0, Deadline(60.0)), cells))
    assert log == ["jax", "jax", "torch", "jax", "torch", "jax"]
    measured = [row for row in rows if not row.left_out]
    assert [(row.name, row.B, row.figures.alone_us is not None) for row in measured] == [
        (name, cell.B, name == "jax xla") for cell in cells for name in ("torch eager", "jax xla")
    ]
    assert all(row.figures.alone_us > 0 for row in measured if row.name == "jax xla")

    log.clear()
    logged(monkeypatch, log, whole_step, "variant", "jax")
    logged(monkeypatch, log, torch_bench, "step_variant", "torch")
    seconds = iter([5e-6, 3e-6, 4e-6, 9e-6, 8e-6])
    monkeypatch.setattr(whole_step, "loop_seconds", lambda run: next(seconds))
    left_out = frozenset(whole_step.MAIN) - {"jax plain"}
    scale = dataclasses.replace(SMALL, rounds=2, step_loop=1, steps_left_out=left_out)
    first, *_, last = [row for row in parts.step_rows(Run(scale, False, 1e9, 0, Deadline(60.0))) if row.name == "jax plain"]
    assert log == ["jax", "torch"]
    assert (first.figures.device_us, first.figures.alone_us) == (pytest.approx(4.0), pytest.approx(4.0))
    assert (last.figures.device_us, last.figures.alone_us) == (pytest.approx(8.5), pytest.approx(4.0))
    assert report.shown(last)["alone us"] == "4.0"


def test_a_round_begins_with_a_call_that_does_not_count(monkeypatch):
    """What ran before was another variant."""
    log = []

    def seconds_of(call):
        log.append("clock")
        call()
        log.append("end")
        return 1.0

    monkeypatch.setattr(clock, "seconds_of", seconds_of)
    variants = {name: Variant(functools.partial(log.append, name), wait=lambda _: log.append("wait")) for name in ("a", "b")}
    clock.in_turn(variants, {name: Figures() for name in variants}, rounds=1, calls=2, profiled_calls=0)
    assert log == [
        x
        for name in "ab"
        for x in (
            *(name, "wait"),
            *(*[name] * 8, "wait"),  # the dispatch
            *("clock", name, "wait", "end"),
            *("clock", name, name, name, "wait", "end"),
        )
    ]


def test_the_process_of_a_job_prints_its_rows(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["jdspark", "bench"])
    scale = dataclasses.replace(SMALL, rounds=1, calls=1)
    monkeypatch.setattr(sys, "stdin", io.StringIO("60.0\n"))
    assert command.run_bench(arguments("--only-job", "0", "--parts", "acceptance", "--bandwidth", "1e9"), scale) == 0
    ready, *lines = capsys.readouterr().out.splitlines()
    assert ready == command.READY
    rows = [command.row_of(line) for line in lines]
    assert {row.part for row in rows} == {"bookkeeping and acceptance"}
    assert {row.name for row in rows if not row.left_out} >= {"jax xla"}


def test_a_job_that_raises_says_which_one(capsys, monkeypatch):
    def fails(run):
        raise MemoryError("no room for the pool")
        yield

    monkeypatch.setitem(parts.PARTS, "compile", (1.0, fails))
    scale = dataclasses.replace(SMALL, compiled=(Cell(1, 20), Cell(4, 10)))
    for job in ("0", "1"):
        command.run_bench(arguments("--only-job", job, "--parts", "compile", "--bandwidth", "1e9"), scale)
    rows = [command.row_of(line) for line in capsys.readouterr().out.splitlines()]
    assert [row.key for row in rows] == [("compile", "all", 1, 20), ("compile", "all", 4, 10)]
    assert all("no room for the pool" in row.figures.error for row in rows)


def test_every_cell_is_in_one_job():
    jobs = jobs_of(FULL, list(PARTS))
    for part, fields in {
        "bookkeeping": ["bookkeeping"], "step": ["step", "every_step"], "parts": ["parts"], "acceptance": ["acceptance"],
        "compile": ["compiled"],
    }.items():  # fmt: skip
        mine = [job for job in jobs if job.part == part]
        for field in fields:
            cells = [cell for job in mine for cell in getattr(job.scale, field)]
            assert sorted(cells) == sorted(getattr(FULL, field)), field
        assert all(job.cell in itertools.chain(*(getattr(job.scale, field) for field in fields)) for job in mine)
    assert [job.part for job in jobs_of(FULL, ["acceptance", "step"])][-1] == "acceptance"
    without_cells = jobs_of(QUICK, ["compile", "parts"])
    assert [(job.part, job.cell) for job in without_cells] == [("parts", NO_CELL), ("compile", NO_CELL)]
    for job in without_cells:
        (row,) = PARTS[job.part][1](Run(job.scale, True, 1e9, 0, Deadline(9.0)))
        assert row.left_out.startswith(parts.FULL_RUN)
        assert job.empty
    assert command.QUICK_LIMIT + command.GRACE < 120, "two minutes, whatever the jobs do"


def test_the_chart_has_a_line_per_variant_and_the_floor(tmp_path):
    cells = ((1, 20), (1, 10), (4, 10))
    rows = [
        Row("step", name, B, context, 9, Figures(device_us=times * context), bytes=1, floor_us=float(context))
        for name, times, at in (("once", 2.0, cells[:1]), ("near", 2.0, cells), ("far", 4.0, cells), ("both", 2.0, cells))
        for B, context in at
    ]
    rows = [dataclasses.replace(x, figures=Figures(device_us=200.0)) if x.key[1:] == ("both", 1, 20) else x for x in rows]
    figure = report.chart(rows, {"what": "one GPU", "on_gpu": True})
    shown = [{line.get_label(): line.get_xydata().tolist() for line in axes.lines} for axes in figure.axes]
    near, far, floor = [[10, 20], [20, 40]], [[10, 40], [20, 80]], [[10, 10], [20, 20]]
    assert shown[0] == {"near": near, "far": far, "both": [[10, 20], [20, 200]], "floor": floor}
    assert shown[2] == {"near": near, "floor": floor}, "near at every point"
    of_B = {"near": [[1, 20], [4, 20]], "far": [[1, 40], [4, 40]], "both": [[1, 20], [4, 20]], "floor": [[1, 10], [4, 10]]}
    assert shown[1] == of_B
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "log", "linear", "linear"]
    of_legend = {line.get_label(): line.get_color() for line in figure.legends[0].get_lines()}
    assert set(of_legend) == {"near", "far", "both", "floor"}
    assert all(line.get_color() == of_legend[line.get_label()] for axes in figure.axes for line in axes.lines)
    without_floor = report.chart(rows[:1], {"what": "a CPU", "on_gpu": False}).axes
    for axes in without_floor:
        (alone,) = axes.lines
        assert alone.get_xydata().tolist() in ([[20, 40]], [[1, 40]])
    assert without_floor[1].get_xticks().tolist() == [1], "the one B that there is"
    report.plot(tmp_path / "empty.png", [], {"what": "nothing", "on_gpu": False})
    assert (tmp_path / "empty.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--parts", "step,stop"], "--parts: unknown stop; known are bookkeeping, step, parts, acceptance, compile"),
        (["--limit", "0"], "--limit is 0.0, expected more than 0 seconds"),
        (["--json", "/nowhere/bench.json"], "--json: /nowhere is not a folder"),
        (["--plot", "/nowhere/bench.png"], "--plot /nowhere/bench.png: expected a file in an existing folder"),
    ],
)
def test_bad_arguments_are_refused(capsys, extra, message):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", *extra])
    assert f"jdspark bench: {message}" in capsys.readouterr().err
