"""The journal of a running step, and how it becomes dump.json.

`dump.json.partial` *is* the coming dump.json without its end: one header line, then one line per record that closes
with `,\\n`. Finishing replaces that last comma by the closing brackets and renames: no byte is written twice, and a
journal that a crash left behind is read by dropping whatever follows the last complete line.

    {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": null, "data": {
     "Functional.linear.0.forward": {"input_args": [...], "input_kwargs": {}, "output": [...]},
     "Module.fc.Linear.forward.0": {...},

`context.jsonl.partial` holds, line by line, what stack.json and construct.json are made of:

    {"stack": 0, "frames": ["File a.py, line 3, in f, \\n y = g(x)"]}
    {"op": "Functional.linear.0.forward", "parent": "Module.fc.Linear.forward.0", "stack": 0}
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

# Not from `codec`, which brings an encoder that the launcher does not need.
quote = json.encoder.encode_basestring_ascii

RECORD_END = ",\n"
EMPTY_CLOSE = "}\n}\n"
CLOSE = "\n}\n}\n"


def header(task: str, level: str, framework: str, data_dir: str | None = None) -> str:
    """The first line of a journal and of a dump.json."""
    head = json.dumps({"task": task, "level": level, "framework": framework, "dump_data_dir": data_dir})
    return f'{head[:-1]}, "data": {{\n'


def complete_text(text: str) -> tuple[str, int]:
    """A partial journal's text -> (valid dump.json text, characters dropped after the last complete record).

    Raises ValueError where not even the header line is complete.
    """
    head_end = text.find("\n")
    if head_end < 0:
        raise ValueError("no complete header line")
    cut = text.rfind(RECORD_END)
    if cut <= head_end:
        return text[: head_end + 1] + EMPTY_CLOSE, len(text) - head_end - 1
    return text[:cut] + CLOSE, len(text) - cut - len(RECORD_END)


def last_name(path: Path) -> str:
    """Name of the last complete record of a journal or of a dump.json; empty where there is none. Raises OSError."""
    with path.open("rb") as file:
        end = file.seek(0, 2)
        window = 1 << 16
        while True:
            start = max(0, end - window)
            file.seek(start)
            lines = file.read(end - start).split(b"\n")
            # The first piece may be the tail of a line; the last one is not complete, or empty.
            for line in reversed(lines[1:-1] if start else lines[:-1]):
                if line.startswith(b' "') and line.endswith((b"},", b"}")):
                    name, _ = json.JSONDecoder().raw_decode(line.decode("utf-8", "replace").strip())
                    return str(name)
            if not start:
                return ""
            window *= 16


@dataclass(slots=True)
class Context:
    """Stacks and parents of one step: what stack.json and construct.json say.

    `frames[i]` is the JSON list of stack i's frames, innermost first: most steps have the stacks of the one before.
    `ops` maps an op to (parent or None, stack index or -1).
    """

    frames: dict[int, str] = field(default_factory=dict)
    ops: dict[str, tuple[str | None, int]] = field(default_factory=dict)

    def stack_json(self) -> str:
        """Text of stack.json: `{"0": [[ops that share it], [frames]]}`."""
        sharing: dict[int, list[str]] = {}
        for op, (_, stack) in self.ops.items():
            if stack >= 0:
                sharing.setdefault(stack, []).append(op)
        # A line per stack: the encoder's own indentation is its slow path (docs/benchmarks.md).
        entries = [
            f' "{i}": [[{", ".join(map(quote, ops))}], {self.frames.get(stack, "[]")}]'
            for i, (stack, ops) in enumerate(sharing.items())
        ]
        return "{\n" + ",\n".join(entries) + "\n}\n"

    def construct_json(self, *, with_parents: bool) -> str:
        """Text of construct.json: `{op: parent}`, or `{}` at level L1, where the field's files are empty too."""
        if not with_parents:
            return "{}\n"
        entries = [f"{quote(op)}: {quote(parent) if parent else 'null'}" for op, (parent, _) in self.ops.items()]
        return "{" + ",\n ".join(entries) + "\n}\n"


def read_context(path: Path) -> Context:
    """What a crash left of a context journal; a torn last line is dropped. Raises OSError."""
    context = Context()
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if "frames" in entry:
                context.frames[entry["stack"]] = json.dumps(entry["frames"])
            elif "op" in entry:
                context.ops[entry["op"]] = (entry.get("parent"), entry.get("stack", -1))
    return context
