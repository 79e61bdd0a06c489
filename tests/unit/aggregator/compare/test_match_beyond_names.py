"""Matching beyond names: mapping files, other ways of calling, keywords, recomputed calls, frameworks, alignment."""

from __future__ import annotations

import copy
import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aggregator import mapping, match, read
from msprobe_launch.errors import ConfigError
from msprobe_launch.records.layout import RankFolder


def tensor(norm=1.0, shape=(2, 3), dtype="torch.float32"):
    return {
        "type": "torch.Tensor",
        "dtype": dtype,
        "shape": list(shape),
        "Max": norm,
        "Min": norm,
        "Mean": norm,
        "Norm": norm,
        "requires_grad": False,
    }


def call(*inputs, out=None, keywords=None, **more):
    return {"input_args": list(inputs), "input_kwargs": keywords or {}, "output": [out] if out else [], **more}


def plain(value):
    return {"type": type(value).__name__, "value": value}


@pytest.fixture
def pairs(tmp_path):
    """{target item: bench item} of two mappings of op -> record."""

    def run(target, bench, options=match.PLAIN, frameworks=("pytorch", "pytorch"), construct=None):
        dumps = []
        for name, ops, framework in (("t", target, frameworks[0]), ("b", bench, frameworks[1])):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            head = {"task": "statistics", "level": "mix", "framework": framework, "dump_data_dir": None}
            (folder / "dump.json").write_text(json.dumps({**head, "data": ops}))
            (folder / "construct.json").write_text(json.dumps(construct or {}))
            dumps.append(read.read(RankFolder(folder, 0)))
        found = match.match(*dumps, options)
        names, others = (dump.items["name"].to_pylist() for dump in dumps)
        run.notes, run.lonely = found.notes, found.lonely
        return {names[i]: others[j] for i, j in enumerate(found.bench_row.tolist()) if j >= 0}

    return run


def write(tmp_path, text):
    (tmp_path / "map.yaml").write_text(text)
    return tmp_path / "map.yaml"


# -- mapping files


def test_data_mapping(pairs, tmp_path):
    target = {"Torch.a.0.forward": call(tensor(), tensor()), "Torch.c.0.forward": call(tensor())}
    bench = {"Torch.b.3.forward": call(tensor(), tensor()), "Torch.c.0.forward": call(tensor())}
    path = write(
        tmp_path,
        "Torch.a.0.forward.input.0: Torch.b.3.forward.input.1\nTorch.a.0.forward.input.9: Torch.c.0.forward.input.7\n",
    )
    found = pairs(target, bench, match.Options(mappings=mapping.load(data=path)))
    assert found["Torch.a.0.forward.input.0"] == "Torch.b.3.forward.input.1"
    assert found["Torch.c.0.forward.input.0"] == "Torch.c.0.forward.input.0"
    assert any("2 names are in no dump, from 'Torch.a.0.forward.input.9'" in note for note in pairs.notes)


def test_cell_mapping(pairs, tmp_path):
    target = {"Cell.fc2.Dense.forward.0": call(tensor()), "Cell.fc2.Dense.backward.0": {"input": [tensor()]}}
    bench = {"Module.fc9.Linear.forward.0": call(tensor()), "Module.fc9.Linear.backward.0": {"input": [tensor()]}}
    found = pairs(target, bench, match.Options(mappings=mapping.load(cell=write(tmp_path, "fc2.Dense: fc9.Linear"))))
    assert found == {
        "Cell.fc2.Dense.forward.0.input.0": "Module.fc9.Linear.forward.0.input.0",
        "Cell.fc2.Dense.backward.0.input.0": "Module.fc9.Linear.backward.0.input.0",
    }


def test_a_cell_mapping_may_leave_out_the_class_and_holds_for_what_is_inside(pairs, tmp_path):
    """As in msprobe; the longest name wins."""
    target = {f"Module.{name}.forward.0": call(tensor()) for name in ("net.Net", "net.a.fc.Linear", "nets.fc.Linear")}
    bench = {f"Module.{name}.forward.0": call(tensor()) for name in ("all.Net", "all.b.fc.Linear", "nets.fc.Linear")}
    options = match.Options(mappings=mapping.load(cell=write(tmp_path, "net: all\nnet.a: all.b\n")))
    found = pairs(target, bench, options)
    assert list(found.values()) == [f"{name}.input.0" for name in bench]
    assert not any("cell mapping" in note for note in pairs.notes)


def test_names_of_a_mapping_that_the_dumps_lack_are_told(pairs, tmp_path):
    target = {"Module.net.fc.Linear.forward.0": call(tensor()), "Torch.abs.0.forward": call(tensor())}
    (tmp_path / "api.yaml").write_text("Torch.abz: Torch.abs\n")
    given = mapping.load(cell=write(tmp_path, "net.fc.Linear: net.fd.Linear"), api=tmp_path / "api.yaml")
    pairs(target, target, match.Options(mappings=given))
    assert [note for note in pairs.notes if "mapping" in note] == [
        "cell mapping: 1 names are not in the dump of their side, from 'net.fd.Linear'. Did you mean 'net.fc.Linear'?",
        "api mapping: 1 names are not in the dump of their side, from 'Torch.abz'. Did you mean 'Torch.abs'?",
    ]


API = """\
- ms_api: Functional.old
  pt_api: Torch.new
  ms_args: [0, 1]
  pt_args: [1, 0]
  ms_output: [0]
  pt_output: [0]
"""


@pytest.mark.parametrize("swap", [False, True])
def test_api_mapping(pairs, tmp_path, swap):
    """The left side is MindSpore's, whichever run it is."""
    gradients = {"input": [tensor(5.0), tensor(5.0)], "output": [tensor(6.0), tensor(7.0)]}
    left = {
        "Functional.old.0.forward": call(tensor(1.0), tensor(2.0), tensor(3.0), out=tensor(4.0)),
        "Functional.old.0.backward": gradients,
    }
    right = {
        "Torch.new.0.forward": call(tensor(2.0), tensor(1.0), tensor(3.0), out=tensor(4.0)),
        "Torch.new.0.backward": gradients,
    }
    options = match.Options(mappings=mapping.load(api=write(tmp_path, API)))
    expected = {
        "Functional.old.0.forward.input.0": "Torch.new.0.forward.input.1",
        "Functional.old.0.forward.input.1": "Torch.new.0.forward.input.0",
        "Functional.old.0.forward.output.0": "Torch.new.0.forward.output.0",
        # Places of a role hold for backward calls as well (msprobe); what they do not name keeps its place, if free.
        "Functional.old.0.backward.input.0": "Torch.new.0.backward.input.1",
        "Functional.old.0.backward.input.1": "Torch.new.0.backward.input.0",
        "Functional.old.0.backward.output.0": "Torch.new.0.backward.output.0",
        "Functional.old.0.backward.output.1": "Torch.new.0.backward.output.1",
    }
    if swap:
        found = pairs(right, left, options, ("pytorch", "mindspore"))
        assert found == {b: a for a, b in expected.items()}
    else:
        assert pairs(left, right, options, ("mindspore", "pytorch")) == expected


def test_layer_mapping(pairs, tmp_path):
    target = {
        "Cell.network.layers.0.Block.forward.0": call(tensor()),
        "Cell.network.layers.0.norm1.Norm.forward.0": call(tensor()),
    }
    bench = {
        "Module.module.layers.0.Layer.forward.0": call(tensor()),
        "Module.module.layers.0.input_norm.RMSNorm.forward.0": call(tensor()),
    }
    path = write(tmp_path, "TopLayer:\n  network: module\nBlock:\n  norm1: input_norm\n")
    found = pairs(target, bench, match.Options(mappings=mapping.load(layer=path)), ("mindspore", "pytorch"))
    assert len(found) == 2
    assert not any("layer mapping" in note for note in pairs.notes)
    path = write(tmp_path, "TopLayer: {network: module}\nBlock: {norm2: input_norm}\nBlok: {a: b}\nLayer: {x: y}\n")
    pairs(target, bench, match.Options(mappings=mapping.load(layer=path)), ("mindspore", "pytorch"))
    (note,) = (note for note in pairs.notes if "layer mapping" in note)
    assert note.startswith("layer mapping: the dumps lack 2 of the classes and names inside them, from 'Block: norm2'.")
    assert "'norm1'" in note


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("data", "- a", "holds list"),
        ("data", "a: b\nc: b\n", "line 2: 'b' is given to both 'a' and 'c'"),
        ("data", "a: b\na: c\n", "line 2: 'a' stands there twice"),
        ("cell", "a: b\n? [c]\n: d\n", "line 2: a list cannot be a name"),
        ("data", "a: [b]", "line 1: 'a' needs one name"),
        ("data", "a: : b", "is not YAML"),
        ("api", "- ms_api: a\n  pt_api: b\n- ms_apis: a\n", "line 3: unknown key 'ms_apis'. Did you mean 'ms_api'"),
        ("api", "- ms_api: a\n", "entry 1, line 1: 'pt_api' is missing"),
        (
            "api",
            "- {ms_api: a, pt_api: b,\n   ms_args: [0, 0], pt_args: [0, 1]}",
            "line 2: 'ms_args' names a place twice",
        ),
        ("api", "- {ms_api: a, pt_api: b,\n   ms_args: 0}", "line 2: 'ms_args' must be a list of places"),
        ("api", "- {ms_api: a, pt_api: b, ms_args: [0], pt_args: []}", "names 1 places and 'pt_args' 0"),
        ("layer", "Block: [a]", "under 'Block'"),
        ("layer", "Block:\n  a: b\n  c: b\n", "line 3, under 'Block': 'b' is given to both"),
    ],
)
def test_files_in_error(tmp_path, kind, text, says):
    with pytest.raises(ConfigError) as error:
        mapping.load(**{kind: write(tmp_path, text)})
    assert says in str(error.value)
    assert "map.yaml" in str(error.value)


# -- what says the same in other words


def test_operators_methods_and_functions_are_one_api(pairs):
    target = {
        "Tensor.__add__.0.forward": call(tensor(1.0), out=tensor(1.0)),
        "Tensor.__add__.1.forward": call(tensor(2.0), out=tensor(2.0)),
        "Tensor.__add__.1.backward": {"input": [tensor(5.0)]},
    }
    bench = {
        "Torch.add.0.forward": call(tensor(1.0), out=tensor(1.0)),
        "Tensor.add.0.forward": call(tensor(2.0), out=tensor(2.0)),
        "Tensor.add.0.backward": {"input": [tensor(5.0)]},
    }
    found = pairs(target, bench)
    assert found["Tensor.__add__.0.forward.input.0"] == "Torch.add.0.forward.input.0"
    assert found["Tensor.__add__.1.forward.output.0"] == "Tensor.add.0.forward.output.0"
    assert found["Tensor.__add__.1.backward.input.0"] == "Tensor.add.0.backward.input.0"


def test_other_counts_of_an_api_are_not_shifted(pairs):
    target = {"Tensor.__add__.0.forward": call(tensor()), "Torch.mul.0.forward": call(tensor())}
    bench = {
        "Torch.add.0.forward": call(tensor()),
        "Tensor.__add__.0.forward": call(tensor()),
        "Torch.mul.0.forward": call(tensor()),
    }
    assert pairs(target, bench)["Tensor.__add__.0.forward.input.0"] == "Tensor.__add__.0.forward.input.0"


@pytest.mark.parametrize("swap", [False, True])
def test_positional_against_keyword(pairs, swap):
    ours = {"Functional.dropout.0.forward": call(tensor(), keywords={"p": plain(0.1), "training": plain(True)})}
    theirs = {"Functional.dropout.0.forward": call(tensor(), plain(0.1), plain(True))}
    found = pairs(theirs, ours) if swap else pairs(ours, theirs)
    wanted = {
        "Functional.dropout.0.forward.input.0": "Functional.dropout.0.forward.input.0",
        "Functional.dropout.0.forward.input.p": "Functional.dropout.0.forward.input.1",
        "Functional.dropout.0.forward.input.training": "Functional.dropout.0.forward.input.2",
    }
    assert found == ({b: a for a, b in wanted.items()} if swap else wanted)


def test_a_keyword_is_matched_at_the_same_place_inside_only(pairs):
    target = {"Torch.a.0.forward": call({"c": tensor()}, keywords={"also": {"c": tensor()}})}
    bench = {"Torch.a.0.forward": call({"a": tensor()}, keywords={"also": {"c": tensor()}})}
    assert pairs(target, bench) == {"Torch.a.0.forward.input.also.c": "Torch.a.0.forward.input.also.c"}


def test_two_keywords_are_never_one(pairs):
    target = {"Torch.sum.0.forward": call(tensor(), keywords={"dim": plain(1)})}
    bench = {"Torch.sum.0.forward": call(tensor(), keywords={"axis": plain(1)})}
    assert len(pairs(target, bench)) == 1


def test_recomputed_calls_are_left_out(pairs):
    def linear(number, norm, **more):
        return {f"Functional.linear.{number}.forward": call(tensor(norm), **more)}

    bench = {
        **linear(0, 1.0),
        **linear(1, 2.0),
        "Functional.linear.1.backward": {"input": [tensor(9.0)]},
        "Functional.linear.0.backward": {"input": [tensor(8.0)]},
        **linear(2, 3.0),
    }
    target = {
        **linear(0, 1.0),
        **linear(1, 2.0),
        **linear(2, 1.0, is_recompute=True),
        "Functional.linear.1.backward": {"input": [tensor(9.0)]},
        "Functional.linear.2.backward": {"input": [tensor(8.0)], "is_recompute": True},
        **linear(3, 3.0),
    }
    found = pairs(target, bench)
    assert found == {
        "Functional.linear.0.forward.input.0": "Functional.linear.0.forward.input.0",
        "Functional.linear.1.forward.input.0": "Functional.linear.1.forward.input.0",
        "Functional.linear.1.backward.input.0": "Functional.linear.1.backward.input.0",
        "Functional.linear.2.backward.input.0": "Functional.linear.0.backward.input.0",
        "Functional.linear.3.forward.input.0": "Functional.linear.2.forward.input.0",
    }
    assert any("1 ops of the target, 0 of the bench" in note for note in pairs.notes)
    assert len(pairs(target, target)) == 6, "both sides recompute: matched as they are"


def test_mindspore_against_pytorch(pairs):
    target = {
        "Cell.net.fc.Dense.forward.0": call(tensor(), out=tensor()) | {"parameters": {"weight": tensor()}},
        "Cell.net.norm.LayerNorm.forward.0": call(tensor()) | {"parameters": {"gamma": tensor(), "beta": tensor()}},
        "Cell.net.norm.LayerNorm.parameters_grad.0": {"gamma": [tensor()]},
        "Mint.add.0.forward": call(tensor(), tensor()),
    }
    bench = {
        "Module.net.fc.Linear.forward.0": call(tensor(), out=tensor()) | {"parameters": {"weight": tensor()}},
        "Module.net.norm.LayerNorm.forward.0": call(tensor()) | {"parameters": {"weight": tensor(), "bias": tensor()}},
        "Module.net.norm.LayerNorm.parameters_grad.0": {"weight": [tensor()]},
        "Tensor.__add__.0.forward": call(tensor(), tensor()),
    }
    found = pairs(target, bench, frameworks=("mindspore", "pytorch"))
    assert found["Cell.net.fc.Dense.forward.0.parameters.weight"] == "Module.net.fc.Linear.forward.0.parameters.weight"
    assert (
        found["Cell.net.norm.LayerNorm.forward.0.parameters.beta"]
        == "Module.net.norm.LayerNorm.forward.0.parameters.bias"
    )
    assert (
        found["Cell.net.norm.LayerNorm.parameters_grad.0.gamma"] == "Module.net.norm.LayerNorm.parameters_grad.0.weight"
    )
    assert found["Mint.add.0.forward.input.1"] == "Tensor.__add__.0.forward.input.1"


ACROSS = ("mindspore", "pytorch")


def ms(*args, **how):
    return {**tensor(*args, **{"dtype": "Float32", **how}), "type": "mindspore.Tensor"}


def test_buffers_and_tables_of_mindspore_have_pytorchs_names(pairs):
    own = {"gamma": ms(), "moving_mean": ms(), "moving_variance": ms()}
    other = {"weight": tensor(), "running_mean": tensor(), "running_var": tensor()}
    target = {
        "Cell.bn.BatchNorm2d.forward.0": call() | {"parameters": own},
        "Cell.tok.Embedding.forward.0": call() | {"parameters": {"embedding_table": ms()}},
    }
    bench = {
        "Module.bn.BatchNorm2d.forward.0": call() | {"parameters": other},
        "Module.tok.Embedding.forward.0": call() | {"parameters": {"weight": tensor()}},
    }
    found = pairs(target, bench, frameworks=ACROSS)
    start, bench_start = "Cell.bn.BatchNorm2d.forward.0.parameters.", "Module.bn.BatchNorm2d.forward.0.parameters."
    assert found == {
        f"{start}gamma": f"{bench_start}weight",
        f"{start}moving_mean": f"{bench_start}running_mean",
        f"{start}moving_variance": f"{bench_start}running_var",
        "Cell.tok.Embedding.forward.0.parameters.embedding_table": "Module.tok.Embedding.forward.0.parameters.weight",
    }
    assert {b: a for a, b in found.items()} == pairs(bench, target, frameworks=ACROSS[::-1])


def test_a_primitive_stands_opposite_the_function_that_it_is(pairs):
    """Calls in their order, inputs at their places; its further outputs and what is only a part stay alone."""
    x, gamma, beta, out = (float(i) for i in range(1, 5))
    norm = "Primitive.layer_norm.LayerNorm.0"
    target = {
        "Primitive.act.ReLU.0.forward": call(ms(5.0)),
        "Functional.relu.0.forward": call(ms(6.0)),
        f"{norm}.forward": call(ms(x), ms(gamma), ms(beta)) | {"output": [ms(out), ms(8.0)]},
        "Primitive.matmul.MatMul.0.forward": call(ms(9.0)),
        f"{norm}.backward": {"input": [ms(out), None], "output": [ms(x), ms(gamma), ms(beta)]},
    }
    keywords = {"weight": tensor(gamma), "bias": tensor(beta)}
    bench = {
        "Functional.relu.0.forward": call(tensor(5.0)),
        "Functional.relu.1.forward": call(tensor(6.0)),
        "Functional.layer_norm.0.forward": call(tensor(x), [plain(16)], keywords=keywords, out=tensor(out)),
        "Functional.linear.0.forward": call(tensor(9.0)),
        "Functional.layer_norm.0.backward": {
            "input": [tensor(out)],
            "output": [tensor(x), tensor(gamma), tensor(beta)],
        },
    }
    expected = {
        "Primitive.act.ReLU.0.forward.input.0": "Functional.relu.0.forward.input.0",
        "Functional.relu.0.forward.input.0": "Functional.relu.1.forward.input.0",
        f"{norm}.forward.input.0": "Functional.layer_norm.0.forward.input.0",
        f"{norm}.forward.input.1": "Functional.layer_norm.0.forward.input.weight",
        f"{norm}.forward.input.2": "Functional.layer_norm.0.forward.input.bias",
        f"{norm}.forward.output.0": "Functional.layer_norm.0.forward.output.0",
        f"{norm}.backward.input.0": "Functional.layer_norm.0.backward.input.0",
        **{f"{norm}.backward.output.{i}": f"Functional.layer_norm.0.backward.output.{i}" for i in range(3)},
    }
    assert pairs(target, bench, frameworks=ACROSS) == expected
    assert pairs(bench, target, frameworks=ACROSS[::-1]) == {b: a for a, b in expected.items()}
    less = {name: op for name, op in bench.items() if name != "Functional.relu.1.forward"}
    alone = pairs(target, less, frameworks=ACROSS)
    assert not any("ReLU" in name for name in alone), "another number of calls: nobody knows which is which"


def test_two_apis_of_mindspore_that_are_one_of_pytorch(pairs):
    """`transpose` takes all axes as PyTorch's `permute` does; `mint.transpose` and `swapaxes` are `transpose`."""
    target = {
        "Functional.transpose.0.forward": call(ms(1.0)),
        "Tensor.permute.0.forward": call(ms(2.0)),
        "Tensor.transpose.0.forward": call(ms(3.0)),
        "Tensor.swapaxes.0.forward": call(ms(4.0)),
        "Mint.transpose.0.forward": call(ms(5.0)),
        "Tensor.transpose.0.backward": {"input": [ms(3.0)]},
    }
    bench = {
        "Torch.permute.0.forward": call(tensor(1.0)),
        "Torch.permute.1.forward": call(tensor(2.0)),
        "Torch.permute.2.forward": call(tensor(3.0)),
        "Tensor.transpose.0.forward": call(tensor(4.0)),
        "Tensor.transpose.1.forward": call(tensor(5.0)),
        "Torch.permute.2.backward": {"input": [tensor(3.0)]},
    }
    found = pairs(target, bench, frameworks=ACROSS)
    assert found == {
        f"{a}.input.0": f"{b}.input.0"
        for a, b in zip(
            [*list(target)[:-1], "Tensor.transpose.0.backward"],
            [*list(bench)[:-1], "Torch.permute.2.backward"],
            strict=True,
        )
    }


def test_keywords_and_other_numbers_are_found_across_frameworks(pairs):
    target = {"Functional.gelu.0.forward": call(ms(1.0), ms(7.0, shape=(4,)))} | {
        f"Functional.exp.{i}.forward": call(ms(float(i))) for i in (5, 6, 8)
    }
    bench = {"Functional.gelu.0.forward": call(tensor(1.0), keywords={"scale": tensor(7.0, shape=(4,))})} | {
        f"Functional.exp.{i}.forward": call(tensor(norm)) for i, norm in enumerate((5.0, 8.0))
    }
    found = pairs(target, bench, FUZZY, ACROSS)
    assert found == {
        "Functional.gelu.0.forward.input.0": "Functional.gelu.0.forward.input.0",
        "Functional.gelu.0.forward.input.1": "Functional.gelu.0.forward.input.scale",
        "Functional.exp.5.forward.input.0": "Functional.exp.0.forward.input.0",
        "Functional.exp.8.forward.input.0": "Functional.exp.1.forward.input.0",
    }


# -- alignment

FUZZY = match.Options(fuzzy=True)


def linears(norms, first=0):
    return {f"Functional.linear.{i}.forward": call(tensor(norm)) for i, norm in enumerate(norms, first)}


def test_a_call_more_is_aligned_by_what_the_calls_hold(pairs):
    """Calls 10 to 14 against 0 to 3: no number is common, and the one that is too many is found by its norm."""
    target, bench = linears([1.0, 2.0, 77.0, 3.0, 4.0], first=10), linears([1.0, 2.0, 3.0, 4.0])
    extra = {"Torch.x.0.forward": call(tensor())}
    assert len(pairs(target | extra, bench | extra)) == 1, "not without --fuzzy-match"
    found = pairs(target | extra, bench | extra, FUZZY)
    assert found == {"Torch.x.0.forward.input.0": "Torch.x.0.forward.input.0"} | {
        f"Functional.linear.{a}.forward.input.0": f"Functional.linear.{b}.forward.input.0"
        for a, b in ((10, 0), (11, 1), (13, 2), (14, 3))
    }


def test_a_call_more_in_the_middle_does_not_shift_the_others(pairs):
    """Logging: one `x + 1` more, outside the graph. Its backward calls have the numbers of their forward calls."""

    def adds(norms, without=()):
        forward = {f"Tensor.add.{i}.forward": call(tensor(norm), tensor(norm)) for i, norm in enumerate(norms)}
        backward = {
            f"Tensor.add.{i}.backward": {"input": [tensor(100 + norm)]}
            for i, norm in reversed(list(enumerate(norms)))
            if i not in without
        }
        return forward | backward

    bench = adds([1.0, 2.0, 3.0])
    target = adds([1.0, 50.0, 2.0, 3.0], without={1})
    plain = pairs(target, bench)
    assert plain["Tensor.add.1.forward.input.0"] == "Tensor.add.1.forward.input.0"
    (note,) = (note for note in pairs.notes if "--fuzzy-match" in note)
    assert note.startswith(
        "1 APIs or modules are called more often by one side, from 'Tensor.add' forward (4 times, the"
    )
    expected = {
        f"Tensor.add.{a}.{rest}": f"Tensor.add.{b}.{rest}"
        for a, b in ((0, 0), (2, 1), (3, 2))
        for rest in ("forward.input.0", "forward.input.1", "backward.input.0")
    }
    assert pairs(target, bench, FUZZY) == expected
    assert pairs(bench, target, FUZZY) == {b: a for a, b in expected.items()}
    assert not any("called more often" in note for note in pairs.notes)


def test_calls_of_another_shape_are_not_aligned(pairs):
    target = {"Torch.a.0.forward": call(tensor()), "Torch.b.7.forward": call(tensor(shape=(4,)))}
    bench = {"Torch.a.0.forward": call(tensor()), "Torch.b.1.forward": call(tensor(shape=(5,)))}
    assert len(pairs(target, bench, FUZZY)) == 1


def test_the_nearest_candidate_and_why_it_was_not_taken(pairs):
    target = {
        **linears([1.0, 2.0]),
        "Torch.softmax_new.0.forward": call(tensor()),
        "Torch.odd.0.forward": call(tensor()),
    }
    bench = {**linears([1.0]), "Torch.softmax.0.forward": call(tensor())}
    pairs(target, bench)
    found = {entry.op: entry for entry in pairs.lonely if entry.side == "target"}
    assert found["Functional.linear.1.forward"].nearest == "Functional.linear.0.forward"
    assert "taken by Functional.linear.0.forward" in found["Functional.linear.1.forward"].why
    assert found["Torch.softmax_new.0.forward"].nearest == "Torch.softmax.0.forward"
    assert found["Torch.odd.0.forward"].nearest == ""
    assert [entry.op for entry in pairs.lonely if entry.side == "bench"] == ["Torch.softmax.0.forward"]


OPS = st.dictionaries(
    st.builds(
        lambda api, number, phase: f"{api}.{number}.{phase}",
        st.sampled_from(["Functional.linear", "Torch.add", "Tensor.__add__", "Tensor.add", "Torch.mul"]),
        st.integers(0, 6),
        st.sampled_from(["forward", "backward"]),
    ),
    st.builds(
        lambda norm, width, keywords, again: (
            call(tensor(norm, (width,)), keywords={"p": plain(1)}, is_recompute=again)
            if keywords
            else call(tensor(norm, (width,)), plain(1), is_recompute=again)
        ),
        st.sampled_from([1.0, 2.0, 3.0]),
        st.integers(1, 2),
        st.booleans(),
        st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=10,
)


def dump_of(folder, ops):
    folder.mkdir(exist_ok=True)
    head = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
    (folder / "dump.json").write_text(json.dumps({**head, "data": ops}))
    return read.read(RankFolder(folder, 0))


def found_pairs(a, b, options):
    try:
        found = match.match(a, b, options)
    except match.NothingUsable:
        return set()
    names, others = a.items["name"].to_pylist(), b.items["name"].to_pylist()
    rows = [row for row in found.bench_row.tolist() if row >= 0]
    assert len(rows) == len(set(rows)), "an injection"
    return {(names[i], others[j]) for i, j in enumerate(found.bench_row.tolist()) if j >= 0}


def add(norm, again=False, keywords=None):
    inputs = (tensor(norm, (1,)),) if keywords else (tensor(norm, (1,)), plain(1))
    return call(*inputs, keywords=keywords, is_recompute=again)


@settings(deadline=None, max_examples=60)
@given(OPS, OPS, st.randoms(use_true_random=False))
@example(
    # Without the recomputed call, two backward calls of the bench have one name.
    {"Functional.linear.0.forward": add(1.0), "Tensor.add.0.backward": add(1.0, keywords={"p": plain(1)})},
    {
        "Functional.linear.0.forward": add(1.0),
        "Tensor.add.0.forward": add(1.0),
        "Tensor.add.0.backward": add(1.0),
        "Tensor.add.1.forward": add(1.0, again=True),
        "Tensor.add.1.backward": add(1.0),
    },
    random.Random(0),
)
def test_matching_is_a_partial_injection_symmetric_and_independent_of_file_order(
    tmp_path_factory, target, bench, chance
):
    root = tmp_path_factory.mktemp("m")
    a, b = dump_of(root / "a", target), dump_of(root / "b", bench)
    found = found_pairs(a, b, FUZZY)
    assert {(y, x) for x, y in found_pairs(b, a, FUZZY)} == found
    assert found_pairs(a, a, FUZZY) == {(name, name) for name in a.items["name"].to_pylist()}
    # Only where one function is called in several ways, or again, does the order of the records tell anything.
    told = ("add", "__add__")
    if any(record["is_recompute"] for record in (*target.values(), *bench.values())):
        return
    if any(op.split(".")[1] in told for op in (*target, *bench)):
        return
    shuffled = list(copy.deepcopy(target).items())
    chance.shuffle(shuffled)
    assert found_pairs(dump_of(root / "c", dict(shuffled)), b, FUZZY) == found


@settings(deadline=None, max_examples=40)
@given(OPS, OPS, st.data())
def test_mappings_may_stand_in_any_order_and_be_swapped(tmp_path_factory, target, bench, data):
    root = tmp_path_factory.mktemp("m")
    a, b = dump_of(root / "a", target), dump_of(root / "b", bench)
    left = data.draw(st.permutations(a.items["name"].to_pylist()))
    right = data.draw(st.permutations(b.items["name"].to_pylist()))
    given_pairs = list(zip(left, right, strict=False))
    results = [
        found_pairs(a, b, match.Options(mappings=mapping.Mappings(data=dict(order))))
        for order in (given_pairs, given_pairs[::-1])
    ]
    assert results[0] == results[1]
    assert set(given_pairs) <= results[0]
    inverse = match.Options(mappings=mapping.Mappings(data={y: x for x, y in given_pairs}))
    assert {(y, x) for x, y in found_pairs(b, a, inverse)} == results[0]
