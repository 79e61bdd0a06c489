"""Ranks put together: whole values from their parts, and comparisons of small hand-made runs in other layouts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aggregator
from aggregator import cli, noise, sources
from aggregator.layouts import combine, plan, shards
from aggregator.layouts.combine import Part, Vocabulary
from aggregator.layouts.compare import compare_unit
from aggregator.model import RankComparison
from aggregator.values import CHUNK, UnreadableValues, open_values
from msprobe_launch.errors import UsageError

RNG = np.random.default_rng(5)


# -- statistics of a whole from those of its parts


def part_of(arrays: Sequence[np.ndarray], vocabulary: Vocabulary) -> Part:
    """One rank's rows, each an array."""
    numbers = [[], [], [], []]
    for array in arrays:
        wide = array.astype(np.float64)
        found = (wide.max(), wide.min(), wide.mean(), np.linalg.norm(wide)) if array.size else (math.nan,) * 4
        for column, value in zip(numbers, found, strict=True):
            column.append(value)
    there = np.array([array.size > 0 for array in arrays])
    none = np.full(len(arrays), vocabulary.nothing)
    return Part(
        np.ones(len(arrays), bool),
        tuple(np.array(column) for column in numbers),
        (there,) * 4,
        (np.where(there, -1, none),) * 4,
        np.array([vocabulary.add(str(list(array.shape))) for array in arrays]),
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_statistics_of_shards_are_those_of_the_whole_however_they_are_cut(data: Any) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dim = data.draw(st.integers(0, len(shape) - 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, shape[dim]), min_size=1, max_size=3)))
    array = np.array(data.draw(st.lists(st.floats(-1e6, 1e6), min_size=math.prod(shape), max_size=math.prod(shape))))
    whole = array.reshape(shape)
    vocabulary = Vocabulary()
    parts = [part_of([piece], vocabulary) for piece in np.split(whole, cuts, dim)]
    found = combine.joined(parts, np.array([dim]), vocabulary)
    expected = part_of([whole], vocabulary)
    assert vocabulary.texts()[found.shapes[0]] == str(shape)
    scale = float(np.abs(whole).max()) or 1.0
    for i in range(4):
        assert found.numbers[i][0] == pytest.approx(expected.numbers[i][0], rel=1e-12, abs=1e-12 * scale)
        assert found.is_number[i][0]


def test_not_a_number_in_one_shard_is_in_the_whole() -> None:
    vocabulary = Vocabulary()
    parts = [part_of([np.array([1.0, 2.0])], vocabulary), part_of([np.array([np.nan, 3.0])], vocabulary)]
    found = combine.joined(parts, np.array([0]), vocabulary)
    assert all(math.isnan(found.numbers[i][0]) and found.is_number[i][0] for i in range(4))


def test_of_a_sum_of_parts_only_the_mean_follows_and_of_one_element_everything() -> None:
    vocabulary = Vocabulary()
    parts = [part_of([np.array([1.0, -2.0]), np.array([3.0])], vocabulary) for _ in range(2)]
    counts = combine.elements(parts[0].shapes, vocabulary)
    found = combine.summed(parts, counts, vocabulary)
    assert [found.is_number[i].tolist() for i in range(4)] == [
        [False, True],
        [False, True],
        [True, True],
        [False, True],
    ]
    assert found.numbers[2].tolist() == [-1.0, 6.0]
    assert [found.numbers[i][1] for i in (0, 1, 3)] == [6.0, 6.0, 6.0]


# -- stored values


@pytest.mark.parametrize(("shape", "dim"), [((3, 5, 7), 0), ((3, 5, 7), 1), ((3, 5, 7), 2), ((2, 3 * CHUNK), 1)])
def test_joined_files_read_as_the_whole_in_chunks(tmp_path: Path, shape: tuple[int, ...], dim: int) -> None:
    whole = RNG.normal(size=shape).astype(np.float32)
    paths = []
    for number, piece in enumerate(np.split(whole, [1, 2], dim)):
        paths.append(tmp_path / f"{number}.npy")
        # Fortran order: what a transposed parameter looks like on disk.
        np.save(paths[-1], np.asfortranarray(piece) if number else piece)
    found = shards.open_joined(paths, dim)
    assert found.shape == shape
    pieces = [piece.copy() for piece in found.chunks()]
    assert all(len(piece) == CHUNK for piece in pieces[:-1])
    assert np.array_equal(np.concatenate(pieces), whole.reshape(-1))


def test_summed_files_read_as_their_sum_and_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    a, b = RNG.normal(size=(2, 40, 30)).astype(np.float32)
    for name, array in (("a", a), ("b", b), ("c", b[:-1, :-1])):
        np.save(tmp_path / f"{name}.npy", array)
    files = {name: tmp_path / f"{name}.npy" for name in "abc"}
    found = np.concatenate(list(shards.open_summed([files["a"], files["b"]]).chunks()))
    assert found == pytest.approx((a.astype(np.float64) + b).reshape(-1), rel=1e-6)
    with pytest.raises(UnreadableValues, match=r"cannot be added.*c\.npy \[39, 29\]"):
        shards.open_summed([files["a"], files["c"]])
    with pytest.raises(UnreadableValues, match=r"cannot be joined along dimension 1.*\[39, 29\]"):
        shards.open_joined([files["a"], files["c"]], 1)
    assert open_values(files["a"]).shape == shards.open_joined([files["a"]], 1).shape


# -- whole comparisons


def tensor(array: np.ndarray, **more: Any) -> dict[str, Any]:
    """A recorded tensor with the statistics of the array."""
    wide = array.astype(np.float64)
    return {
        "type": "torch.Tensor",
        "dtype": "torch.float32",
        "shape": list(array.shape),
        "Max": float(wide.max()),
        "Min": float(wide.min()),
        "Mean": float(wide.mean()),
        "Norm": float(np.linalg.norm(wide)),
        "requires_grad": False,
    } | more


def number(value: float) -> dict[str, Any]:
    return {"type": type(value).__name__, "value": value}


def forward(inputs: Sequence[Any], out: Any, **parameters: Any) -> dict[str, Any]:
    record = {"input_args": list(inputs), "input_kwargs": {}, "output": [out]}
    return record | ({"parameters": parameters} if parameters else {})


Ops = Mapping[str, Any]


def write_run(root: Path, ranks: Mapping[int, Ops], construct: Ops | None = None, task: str = "statistics") -> Path:
    """A run directory with one step."""
    for rank, ops in ranks.items():
        folder = root / "step0" / f"rank{rank}"
        folder.mkdir(parents=True)
        head = {"task": task, "level": "mix", "framework": "pytorch", "dump_data_dir": None}
        (folder / "dump.json").write_text(json.dumps({**head, "data": ops}))
        (folder / "construct.json").write_text(json.dumps(dict(construct or {})))
    (root / "manifest.json").write_text("{}")
    return root


class Found:
    """A compared unit: its result, its table by item."""

    def __init__(self, result: RankComparison) -> None:
        self.result = result
        self.rows = {row["NPU Name"]: row for row in pq.read_table(result.partition).to_pylist()}

    def __getitem__(self, item: str) -> dict[str, Any]:
        return self.rows[item]


@pytest.fixture
def compared(tmp_path: Path) -> Any:
    """Compare two runs of hand-made ranks; the layout is the text of a file, or auto."""

    def run(
        target: Mapping[int, Ops], bench: Mapping[int, Ops], layout: str, constructs: Sequence[Ops] = ({}, {})
    ) -> Found:
        runs = [
            write_run(tmp_path / name, ranks, construct)
            for name, ranks, construct in (("t", target, constructs[0]), ("b", bench, constructs[1]))
        ]
        (tmp_path / "layout.yaml").write_text(layout)
        made = plan.plan(*(sources.find_run((root,)) for root in runs), tmp_path / "layout.yaml")
        assert not made.failures
        (one,) = made.planned
        found = compare_unit(one.unit, step=0, rank=one.rank, partition=tmp_path / "out" / "p.parquet")
        assert isinstance(found, RankComparison), found.reason
        return Found(found)

    return run


TP2 = "target: {tp: 2}\nbench: {tp: 1}\n"

W, X, B = RNG.normal(size=(8, 6)), RNG.normal(size=(4, 6)), RNG.normal(size=8)


def column(shard: int | None, *, twice: bool = False) -> dict[str, Any]:
    """y = x W^T + b, rows of W divided."""
    rows = slice(None) if shard is None else slice(4 * shard, 4 * shard + 4)
    y = X @ W[rows].T + B[rows] * (2 if twice else 1)
    return {"Functional.linear.0.forward": forward([tensor(X), tensor(W[rows]), tensor(B[rows])], tensor(y))}


def row(shard: int | None) -> dict[str, Any]:
    """y = x W^T + b, columns of W divided: a rank has a part of the sum, and the bias is added after it."""
    columns = slice(None) if shard is None else slice(3 * shard, 3 * shard + 3)
    bias = B if shard is None else 0.0
    arguments = [tensor(X[:, columns]), tensor(W[:, columns])] + ([tensor(B)] if shard is None else [])
    return {"Functional.linear.0.forward": forward(arguments, tensor(X[:, columns] @ W[:, columns].T + bias))}


def test_a_column_parallel_layer_is_joined_by_its_shapes_and_rows_say_so(compared: Any) -> None:
    found = compared({r: column(r) for r in (0, 1)}, {0: column(None)}, TP2)
    assert (found.result.findings, found.result.matched, found.result.rows) == (0, 4, 4)
    out = found["Functional.linear.0.forward.output.0"]
    assert (out["NPU Tensor Shape"], out["layout"]) == ("[4, 8]", "ranks 0-1: joined along dimension 1 (by shape)")
    assert json.loads(out["Err_message"]) == [out["layout"]]
    assert found["Functional.linear.0.forward.input.0"]["layout"] == "ranks 0-1: replicas (by shape)"


def test_a_fault_on_one_shard_is_the_first_divergence(compared: Any) -> None:
    found = compared({0: column(0), 1: column(1, twice=True)}, {0: column(None)}, TP2)
    assert found.result.findings == 1
    assert found.result.first.item == "Functional.linear.0.forward.output.0"
    assert "ranks 0-1: joined along dimension 1" in found.result.first.reason


def test_parts_of_a_sum_to_which_no_bias_was_added_are_said_not_to_be_comparable(compared: Any) -> None:
    found = compared({r: row(r) for r in (0, 1)}, {0: row(None)}, TP2)
    out = found["Functional.linear.0.forward.output.0"]
    assert (found.result.findings, out["excess"]) == (0, None)
    assert "parts of a sum" in out["layout"]
    assert "added its bias already" in out["layout"]


def partial_sum(shard: int | None) -> dict[str, Any]:
    columns = slice(None) if shard is None else slice(3 * shard, 3 * shard + 3)
    arguments = [tensor(X[:, columns]), tensor(W[:, columns])]
    return {"Torch.matmul.0.forward": forward(arguments, tensor(X[:, columns] @ W[:, columns].T))}


def test_of_parts_of_a_sum_the_mean_is_compared_and_a_wrong_one_is_found(compared: Any, tmp_path: Path) -> None:
    found = compared({r: partial_sum(r) for r in (0, 1)}, {0: partial_sum(None)}, TP2)
    out = found["Torch.matmul.0.forward.output.0"]
    assert found.result.findings == 0
    assert out["NPU mean"] == pytest.approx(out["Bench mean"])
    assert (out["NPU max"], out["NPU max:text"]) == (None, "None")
    (tmp_path / "t").rename(tmp_path / "t1")
    (tmp_path / "b").rename(tmp_path / "b1")
    wrong = partial_sum(1)
    wrong["Torch.matmul.0.forward"]["output"][0]["Mean"] += 0.5
    found = compared({0: partial_sum(0), 1: wrong}, {0: partial_sum(None)}, TP2)
    assert found.result.first.item == "Torch.matmul.0.forward.output.0"
    assert "parts of a sum" in found.result.first.reason


def test_replicas_that_disagree_are_a_finding_with_both_norms(compared: Any) -> None:
    def norm(weight: np.ndarray) -> dict[str, Any]:
        return {"Functional.layer_norm.0.forward": forward([tensor(X), tensor(weight)], tensor(X))}

    good = RNG.normal(size=6)
    found = compared({0: norm(good), 1: norm(good * 1.5)}, {0: norm(good)}, TP2)
    assert found.result.findings == 1
    assert found.result.first.item == "Functional.layer_norm.0.forward.input.1"
    assert found.result.first.reason.startswith("replicas differ: rank 0 norm")
    assert found["Functional.layer_norm.0.forward.input.1"]["finding"].count("rank") == 2


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("{shard: 1}", r"line 4, divides '\*\.input\.1' along dimension 1: \[4, 6\] and \[4, 6\] make \[4, 12\], "
         r"expected \[8, 6\]"),
        ("{shard: 3}", r"along dimension 3, but the shape is \[4, 6\]"),
        ("{shard: -2}", ""),
        ("replicated", r"shape \[4, 6\] against \[8, 6\]|replicas differ"),
    ],
)  # fmt: skip
def test_a_rule_of_the_file_decides_and_shapes_that_do_not_add_up_are_named(
    compared: Any, rule: str, words: str
) -> None:
    import re

    found = compared({r: column(r) for r in (0, 1)}, {0: column(None)}, f'{TP2}rules:\n  "*.input.1": {rule}\n')
    if not words:
        assert found.result.findings == 0
        assert "(layout file)" in found["Functional.linear.0.forward.input.1"]["layout"]
    else:
        assert found.result.first.item == "Functional.linear.0.forward.input.1"
        assert re.search(words, found.result.first.reason), found.result.first.reason


def dtensor(array: np.ndarray, whole: np.ndarray, placement: Mapping[str, Any], mesh: Any = (0, 1)) -> dict[str, Any]:
    return tensor(
        array,
        type="torch.distributed.tensor.DTensor",
        device_mesh=list(mesh),
        placements=[placement],
        global_shape=list(whole.shape),
    )


def test_placements_tell_what_shapes_cannot(compared: Any) -> None:
    # A square matrix of which each rank holds what looks like the whole of another: only the placement tells.
    def both(shard: int | None) -> dict[str, Any]:
        if shard is None:
            return {"Torch.f.0.forward": forward([tensor(W)], tensor(W))}
        rows, cols = np.split(W, 2, 0)[shard], np.split(W, 2, 1)[shard]
        made = [dtensor(rows, W, {"Shard": {"dim": 0}}), dtensor(cols, W, {"Shard": {"dim": 1}})]
        return {"Torch.f.0.forward": forward(made[:1], made[1])}

    found = compared({r: both(r) for r in (0, 1)}, {0: both(None)}, TP2)
    assert found.result.findings == 0
    assert found["Torch.f.0.forward.output.0"]["layout"] == "ranks 0-1: joined along dimension 1 (placements)"


@pytest.mark.parametrize(("fault", "findings"), [(1.0, 0), (1.01, 1)])
@pytest.mark.parametrize("swapped", [False, True])
def test_shards_of_data_parallel_ranks_are_joined_for_the_first(
    tmp_path: Path, fault: float, findings: int, swapped: bool
) -> None:
    """FSDP against DDP on as many ranks: activations rank by rank, what is divided once."""

    def ops(rank: int, weight: dict[str, Any]) -> dict[str, Any]:
        x = X[2 * rank : 2 * rank + 2]
        return {
            "Functional.linear.0.forward": forward([tensor(x), tensor(W)], tensor(x @ W.T)),
            "Module.fc.Linear.parameters_grad.0": {"weight": [weight]},
        }

    factor = 1.0, fault
    runs = [
        {r: ops(r, dtensor(np.split(W, 2)[r] * factor[r], W, {"Shard": {"dim": 0}})) for r in (0, 1)},
        {r: ops(r, tensor(W)) for r in (0, 1)},
    ]
    target, bench = runs[::-1] if swapped else runs
    found = aggregator.compare_runs(write_run(tmp_path / "t", target), write_run(tmp_path / "b", bench), layout="auto")
    assert (found["excess"] > 1).sum() == findings
    rows = found[found["role"] == "parameters_grad"].set_index("rank")
    assert "joined along dimension 0" in rows["layout"][0] or swapped
    assert "the whole is compared with the first rank" in rows["layout"][1]
    assert found[found["role"] == "output"]["excess"].tolist() == [0.0, 0.0]
    plain = aggregator.compare_runs(tmp_path / "t", tmp_path / "b")
    assert any("1 items are divided among ranks in another way" in note for note in plain.attrs["notes"])


def test_sizes_of_parts_are_no_finding_and_other_arguments_are(compared: Any) -> None:
    def view(width: int, scale: float) -> dict[str, Any]:
        return {"Tensor.view.0.forward": forward([tensor(X), number(4), number(width), number(scale)], tensor(X))}

    found = compared({r: view(3, 0.5) for r in (0, 1)}, {0: view(6, 0.25001)}, TP2)
    assert found["Tensor.view.0.forward.input.2"]["excess"] is None
    assert "a size of this rank's part" in found["Tensor.view.0.forward.input.2"]["layout"]
    assert found.result.first.item == "Tensor.view.0.forward.input.3"


def test_slices_and_values_of_single_ranks_belong_to_the_layout(compared: Any) -> None:
    def cut(begin: int | None, other: int) -> dict[str, Any]:
        bounds = {"type": "slice", "value": [begin, None, None]}
        return {"Tensor.__getitem__.0.forward": forward([tensor(X), bounds, number(other)], tensor(X))}

    found = compared({0: cut(0, 7), 1: cut(3, 8)}, {0: cut(None, 7)}, TP2)
    assert found.result.findings == 0
    assert "another value on each rank" in found["Tensor.__getitem__.0.forward.input.1"]["layout"]
    assert "another value on each rank" in found["Tensor.__getitem__.0.forward.input.2"]["layout"]


def test_a_rule_that_fits_nothing_is_said(compared: Any) -> None:
    rules = "rules:\n  '*.input.1': {shard: 0}\n  'Functional.lineer.*': replicated\n"
    found = compared({r: column(r) for r in (0, 1)}, {0: column(None)}, TP2 + rules)
    said = "layout: no item fits 1 of the rules, from 'Functional.lineer.*' (line 5)."
    assert any(said in note for note in found.result.notes)


# -- data parallel


def trained(batch: np.ndarray, weight: np.ndarray, loss: float, gradient: np.ndarray) -> dict[str, Any]:
    return {
        "Functional.linear.0.forward": forward([tensor(batch), tensor(weight)], tensor(batch @ weight.T)),
        "Functional.mse_loss.0.forward": forward([tensor(batch)], tensor(np.array(loss))),
        "Module.fc.Linear.parameters_grad.0": {"weight": [tensor(batch[:1] * 2)]},
        "Module.fc.Linear.parameters_grad.1": {"weight.applied": [tensor(gradient)]},
    }


def test_data_parallel_sizes_compare_what_all_ranks_agree_on_and_losses_as_means(compared: Any) -> None:
    data, gradient = RNG.normal(size=(8, 6)), RNG.normal(size=(8, 6))
    losses = [1.0, 2.0, 3.0, 6.0]
    target = {r: trained(data[2 * r : 2 * r + 2], W, losses[r], gradient) for r in range(4)}
    bench = {r: trained(data[4 * r : 4 * r + 4], W, loss, gradient) for r, loss in enumerate((1.5, 4.5))}
    found = compared(target, bench, "target: {dp: 4}\nbench: {dp: 2}\n")
    assert found.result.findings == 0
    assert found["Functional.linear.0.forward.input.1"]["excess"] == 0.0
    assert found["Module.fc.Linear.parameters_grad.1.weight.applied"]["excess"] == 0.0
    loss = found["Functional.mse_loss.0.forward.output.0"]
    assert (loss["NPU max"], loss["Bench max"], loss["excess"]) == (3.0, 3.0, 0.0)
    batch = found["Functional.linear.0.forward.input.0"]
    assert batch["excess"] is None
    assert "4 data parallel ranks had other batches than the bench's 2" in batch["layout"]


def test_a_data_parallel_rank_whose_parameters_or_reduced_gradients_differ_is_named(compared: Any) -> None:
    data, gradient = RNG.normal(size=(8, 6)), RNG.normal(size=(8, 6))
    target = {r: trained(data[2 * r : 2 * r + 2], W, 1.0, gradient * (1.1 if r == 2 else 1)) for r in range(4)}
    found = compared(target, {0: trained(data, W, 1.0, gradient)}, "target: {dp: 4}\nbench: {}\n")
    assert found.result.findings == 1
    assert found.result.first.item == "Module.fc.Linear.parameters_grad.1.weight.applied"
    assert found.result.first.reason.startswith("replicas differ: rank 0 norm")


def test_a_gradient_that_the_bench_recorded_once_is_also_the_one_it_applied(compared: Any) -> None:
    gradient = RNG.normal(size=(8, 6))
    data = RNG.normal(size=(2, 6))
    bench = trained(data, W, 1.0, gradient)
    bench["Module.fc.Linear.parameters_grad.0"] = {"weight": [tensor(gradient)]}
    del bench["Module.fc.Linear.parameters_grad.1"]
    target = {r: trained(data, W, 1.0, gradient) for r in (0, 1)}
    found = compared(target, {0: bench}, "target: {dp: 2}\nbench: {dp: 1}\n")
    row_ = found["Module.fc.Linear.parameters_grad.1.weight.applied"]
    assert (row_["Bench Name"], row_["excess"]) == ("Module.fc.Linear.parameters_grad.1.weight.applied", 0.0)


# -- pipeline stages


def blocks(prefix: str, indices: Sequence[int], values: Sequence[float]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Blocks of one layer that call one API each; forward through all of them, then backward."""
    ops: dict[str, Any] = {}
    construct: dict[str, Any] = {}
    for call, (index, value) in enumerate(zip(indices, values, strict=True)):
        module = f"Module.{prefix}.{index}.Block.forward.0"
        api = f"Functional.relu.{call}.forward"
        ops[api] = forward([tensor(X * value)], tensor(X * value, requires_grad=True))
        ops[module] = forward([tensor(X * value)], tensor(X * value), weight=tensor(W * value))
        construct |= {api: module, module: None}
    for call, (index, value) in reversed(list(enumerate(zip(indices, values, strict=True)))):
        ops[f"Functional.relu.{call}.backward"] = {"input": [tensor(X * value)], "output": [tensor(X * value)]}
        ops[f"Module.{prefix}.{index}.Block.backward.0"] = {"input": [tensor(X)], "output": [tensor(X * value)]}
    return ops, construct


@pytest.mark.parametrize("told", [True, False])
def test_stages_are_put_behind_each_other_and_the_first_divergence_is_the_cause(compared: Any, told: bool) -> None:
    values = [1.0, 2.0, 3.0, 4.0]
    bench, construct = blocks("layers", range(4), values)
    wrong = [1.0, 2.5, 3.5, 4.5]  # the second layer is off, and so is all that comes after it
    first, inner = blocks("stage.blocks", range(2), wrong[:2])
    second, _ = blocks("stage.blocks", range(2), wrong[2:])
    stages = "  stages:\n  - {stage.blocks: layers.0}\n  - {stage.blocks: layers.2}\n" if told else ""
    found = compared({0: first, 1: second}, {0: bench}, f"target:\n  pp: 2\n{stages}bench: {{}}\n", (inner, construct))
    assert found.result.matched == found.result.rows == 4 * 9
    assert found.result.first.item == "Functional.relu.1.forward.input.0"
    assert found["Functional.relu.2.forward.input.0"]["layout"] == "stage 1, rank 1"
    assert found["Module.layers.3.Block.forward.0.parameters.weight"]["Bench Name"].startswith("Module.layers.3.")
    order = [name for name in found.rows if name.endswith("output.0") and "relu" in name]
    assert order == [f"Functional.relu.{i}.forward.output.0" for i in range(4)] + [
        f"Functional.relu.{i}.backward.output.0" for i in (3, 2, 1, 0)
    ]


def test_without_modules_calls_are_aligned_by_what_they_hold(compared: Any) -> None:
    def adds(*shapes: tuple[int, ...]) -> dict[str, Any]:
        return {
            f"Tensor.__add__.{i}.forward": forward(
                [tensor(np.full((4, 6), 1.0 + i)), tensor(np.ones(shape))], tensor(X)
            )
            for i, shape in enumerate(shapes)
        }

    # The parallel layer adds its bias itself: one `add` more before each residual.
    target = adds((6,), (4, 6), (6,), (4, 6))
    bench = {f"Tensor.__add__.{i}.forward": target[f"Tensor.__add__.{2 * i + 1}.forward"] for i in range(2)}
    found = compared({0: target, 1: target}, {0: bench}, TP2)
    assert found.result.findings == 0
    assert found["Tensor.__add__.3.forward.input.0"]["Bench Name"] == "Tensor.__add__.1.forward.input.0"
    assert found["Tensor.__add__.0.forward.input.0"]["Bench Name"] == "N/A"


# -- which ranks


def test_ranks_that_are_missing_cost_their_group_only(tmp_path: Path) -> None:
    target = write_run(tmp_path / "t", {r: column(r % 2) for r in (0, 1, 2)})
    bench = write_run(tmp_path / "b", {r: column(None) for r in (0, 1)})
    (target / "step0" / "rank3").mkdir()  # a rank of which no dump is there
    (tmp_path / "l.yaml").write_text("target: {tp: 2, dp: 2}\nbench: {dp: 2}\n")
    runs = [sources.find_run((root,)) for root in (target, bench)]
    made = plan.plan(*runs, tmp_path / "l.yaml")
    results = [
        compare_unit(one.unit, step=0, rank=one.rank, partition=tmp_path / f"{one.rank}.parquet")
        for one in made.planned
    ]
    good = [entry.rank for entry in results if isinstance(entry, RankComparison)]
    bad = [entry for entry in (*made.failures, *results) if not isinstance(entry, RankComparison)]
    assert good == [0]
    assert [entry.rank for entry in bad] == [2]
    assert "rank3" in bad[0].reason or "rank 3" in bad[0].reason


def test_a_file_and_the_dumps_tell_a_grid_of_stages_and_tensor_parallel_ranks(tmp_path: Path) -> None:
    def rank(number_: int) -> dict[str, Any]:
        stage, shard = divmod(number_, 2)
        ops = dict(column(shard))
        ops["Functional.linear.0.forward"]["output"][0]["requires_grad"] = True
        peer = {"type": "int", "value": number_ + 2 if stage == 0 else number_ - 2}
        there, keyword = ("send", "dst") if stage == 0 else ("recv", "src")
        record = {"input_args": [tensor(X)], "input_kwargs": {keyword: peer}, "output": []}
        return {f"Distributed.{there}.0.forward": record, **ops}

    target = sources.find_run((write_run(tmp_path / "t", {r: rank(r) for r in range(4)}),))
    bench = sources.find_run((write_run(tmp_path / "b", {0: column(None)}),))
    (tmp_path / "l.yaml").write_text("target: {tp: 2, pp: 2}\nbench: {}\n")
    for layout in (plan.AUTO, tmp_path / "l.yaml"):
        (one,) = plan.plan(target, bench, layout).planned
        assert one.unit.layout.target.grid == (((0, 1),), ((2, 3),))


def test_auto_tells_tensor_from_data_parallel_by_the_first_value(tmp_path: Path) -> None:
    tp = write_run(tmp_path / "tp", {r: column(r) for r in (0, 1)})
    data = RNG.normal(size=(4, 6))
    dp = write_run(tmp_path / "dp", {r: trained(data[2 * r : 2 * r + 2], W, 1.0, W) for r in (0, 1)})
    one = sources.find_run((write_run(tmp_path / "b", {0: column(None)}),))
    found = [plan.plan(sources.find_run((root,)), one, plan.AUTO).notes[0] for root in (tp, dp)]
    assert "target tp 2, dp 1, pp 1" in found[0]
    assert "target tp 1, dp 2, pp 1" in found[1]
    odd = write_run(tmp_path / "odd", {0: column(0), 1: column(1), 2: trained(data, W, 1.0, W)})
    with pytest.raises(UsageError, match="no regular layout: ranks that begin with the same values are 0-1, 2"):
        plan.plan(sources.find_run((odd,)), one, plan.AUTO)


def embedded(ids: np.ndarray, weight: np.ndarray, constant: np.ndarray) -> dict[str, Any]:
    """A model that begins with embeddings of positions and of tokens, as a dump at level L1 has it."""
    positions = np.arange(ids.shape[1])
    at, tokens = weight[positions], weight[ids]
    learns = {"requires_grad": True}
    return {
        "Torch.ones.0.forward": forward([number(6)], tensor(constant)),
        "Functional.embedding.0.forward": forward(
            [integers(positions), tensor(weight, **learns)], tensor(at, **learns)
        ),
        "Functional.embedding.1.forward": forward([integers(ids), tensor(weight, **learns)], tensor(tokens, **learns)),
        "Torch.tril.0.forward": forward([tensor(constant)], tensor(constant)),
        "Tensor.__add__.0.forward": forward([tensor(at, **learns), tensor(tokens, **learns)], tensor(at + tokens)),
    }


def integers(array: np.ndarray) -> dict[str, Any]:
    return tensor(array, dtype="torch.int64")


def test_auto_is_not_misled_by_what_all_data_parallel_ranks_have(tmp_path: Path) -> None:
    ids, weight, ones = RNG.integers(0, 9, (4, 5)), RNG.normal(size=(9, 6)), np.ones((5, 5))
    dp = write_run(tmp_path / "dp", {r: embedded(ids[2 * r : 2 * r + 2], weight, ones) for r in (0, 1)})
    tp = write_run(tmp_path / "tp", {r: embedded(ids, weight, ones) for r in (0, 1)})
    one = sources.find_run((write_run(tmp_path / "b", {0: embedded(ids, weight, ones)}),))
    assert "target tp 1, dp 2, pp 1" in plan.plan(sources.find_run((dp,)), one, plan.AUTO).notes[0]
    assert "target tp 2, dp 1, pp 1" in plan.plan(sources.find_run((tp,)), one, plan.AUTO).notes[0]


@pytest.mark.parametrize("policy", [None, noise.Policy()])
def test_memory_that_nobody_has_written_is_no_finding(tmp_path: Path, policy: noise.Policy | None) -> None:
    def allocated(value: float) -> dict[str, Any]:
        return {"Torch.empty.0.forward": forward([number(4)], tensor(np.full(4, value))), **column(None)}

    runs = [
        write_run(tmp_path / "t", {0: allocated(1e30), 1: allocated(7.0)}),
        write_run(tmp_path / "b", {0: allocated(0.0)}),
    ]
    (tmp_path / "layout.yaml").write_text(TP2)
    (one,) = plan.plan(*(sources.find_run((root,)) for root in runs), tmp_path / "layout.yaml").planned
    found = compare_unit(one.unit, step=0, rank=0, partition=tmp_path / "p.parquet", policy=policy)
    assert isinstance(found, RankComparison)
    assert found.findings == 0


# -- stored values through the whole comparison


def test_stored_shards_are_joined_and_a_wrong_element_is_found(tmp_path: Path, compared: Any) -> None:
    def with_values(run: str, rank: int, array: np.ndarray, name: str = "out.npy") -> dict[str, Any]:
        folder = tmp_path / run / "step0" / f"rank{rank}" / "dump_tensor_data"
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / name, array.astype(np.float32))
        return tensor(array, data_name=name)

    good = X @ W.T

    def op(out: dict[str, Any], weight: np.ndarray) -> dict[str, Any]:
        return {"Functional.linear.0.forward": forward([tensor(X), tensor(weight)], out)}

    def write(root: Path, ranks: Mapping[int, Ops]) -> sources.Run:
        for rank, ops in ranks.items():
            folder = root / "step0" / f"rank{rank}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "dump.json").write_text(json.dumps({"task": "tensor", "level": "L1", "data": ops}))
        (root / "manifest.json").write_text("{}")
        return sources.find_run((root,))

    (tmp_path / "l.yaml").write_text(f'{TP2}rules:\n  "*.output.0": {{shard: 1}}\n')
    swapped = good.copy()
    swapped[:, [4, 5]] = swapped[:, [5, 4]]  # the same statistics
    bench = write(tmp_path / "b", {0: op(with_values("b", 0, good), W)})
    for name, array, findings in (("same", good, 0), ("swapped", swapped, 1)):
        parts = np.split(array, 2, 1)
        target = write(tmp_path / name, {r: op(with_values(name, r, parts[r]), np.split(W, 2, 0)[r]) for r in (0, 1)})
        (one,) = plan.plan(target, bench, tmp_path / "l.yaml").planned
        found = compare_unit(one.unit, step=0, rank=0, partition=tmp_path / f"{name}.parquet")
        assert isinstance(found, RankComparison), found.reason
        assert (found.mode.value, found.findings) == ("tensor", findings)
        cells = Found(found)["out"]
        assert (cells["MaxAbsErr"] == 0.0) == (findings == 0)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ([], "there is no bench"),
        (["--bench", "b", "--ranks", "0"], "--layout needs all ranks of a group"),
        (["--bench", "b", "--layout", "bad.yaml"], "line 1: unknown key 'tpp' under 'target'. Did you mean 'tp'?"),
    ],
)
def test_what_does_not_go_with_a_layout_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], extra: list[str], words: str
) -> None:
    write_run(tmp_path / "t", {r: column(r) for r in (0, 1)})
    write_run(tmp_path / "b", {0: column(None)})
    (tmp_path / "bad.yaml").write_text("target: {tpp: 2}\nbench: {}\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["t", "--layout", "auto", *extra]) == 2
    assert words in capsys.readouterr().err


def test_the_command_and_the_data_frame_show_one_combined_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "t", {0: column(0), 1: column(1, twice=True)})
    write_run(tmp_path / "b", {0: column(None)})
    monkeypatch.chdir(tmp_path)
    assert cli.main(["t", "--bench", "b", "--layout", "auto", "-o", "out", "--format", "csv"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "target tp 2, dp 1, pp 1 on 2 ranks" in text
    assert "ranks 0-1: joined along dimension 1 (by shape)" in text
    assert [path.name[:20] for path in (tmp_path / "out" / "step0").glob("compare_result*")] == ["compare_result_rank0"]
    frame = aggregator.compare_runs("t", "b", layout="auto")
    assert frame[frame["excess"] > 1]["NPU Name"].tolist() == ["Functional.linear.0.forward.output.0"]
    assert frame["rank"].unique().tolist() == [0]


def test_a_partition_is_read_like_any_other(compared: Any) -> None:
    found = compared({r: column(r) for r in (0, 1)}, {0: column(None)}, TP2)
    names = pq.read_schema(found.result.partition).names
    assert names[-3:] == ["layout", "finding", "excess"] or set(names) >= {"layout", "finding", "excess"}
    assert pa.types.is_string(pq.read_schema(found.result.partition).field("layout").type)
