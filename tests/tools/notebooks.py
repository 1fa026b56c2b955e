"""Run the notebooks of the documentation and keep their outputs, without Jupyter.

    PYTHONPATH=src python -m tests.tools.notebooks       # after a change: writes the outputs anew

A notebook is run from top to bottom in one namespace, in this process. A cell shows what it prints
and the value of its last line: an SVG where the object offers one, else its repr. Tests compare
these with what the file holds.
"""

import ast
import contextlib
import io
import json
import pathlib
import re
import sys
import time

REPOSITORY = pathlib.Path(__file__).parents[2]
FOLDER = REPOSITORY / "docs" / "notebooks"
NUMBER = re.compile(r"\d+(?:\.\d+)?(?: ?%)?")


def outputs_of(source, names, where):
    """Run a cell; what it shows, as a notebook stores it."""
    tree = ast.parse(source, where)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, where, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), where, "eval"), names)
    shown = []
    if printed.getvalue():
        text = lines_of(printed.getvalue())
        shown.append({"output_type": "stream", "name": "stdout", "text": text})
    if value is not None:
        data = {"text/plain": lines_of(repr(value))}
        if hasattr(value, "_repr_svg_"):
            data["image/svg+xml"] = lines_of(value._repr_svg_())
        shown.append({"output_type": "display_data", "metadata": {}, "data": data})
    return shown


def lines_of(text):
    """Text as a list of lines with their ends, as notebooks store it."""
    return text.splitlines(keepends=True)


def executed(path):
    """The notebook of a file with new outputs."""
    notebook = json.loads(path.read_text())
    names = {"__name__": "__main__"}
    count = 0
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            count += 1
            cell["execution_count"] = count
            where = f"{path.name}, cell {number}"
            cell["outputs"] = outputs_of("".join(cell["source"]), names, where)
    return notebook


def differences(stored, made):
    """Cells whose outputs are not those that the file holds, as a line each.

    Words and whole numbers must be the same. Fractions and percentages may differ by one in their
    last digit, which is what another order of additions can do to them.
    """
    found = []
    for number, (old, new) in enumerate(zip(stored["cells"], made["cells"], strict=True)):
        before, after = (json.dumps(cell.get("outputs")) for cell in (old, new))
        if _words(before) != _words(after):
            found.append(f"cell {number}: shows something else")
            continue
        for a, b in zip(NUMBER.findall(before), NUMBER.findall(after), strict=True):
            was, now = (float(x.rstrip(" %")) for x in (a, b))
            unit = 10.0 ** -len(b.rstrip(" %").partition(".")[2])
            exact = "." not in b and "%" not in b
            if abs(was - now) > (0 if exact else 1.001 * unit):
                found.append(f"cell {number}: {a} in the file, {b} now")
    return found


def _words(text):
    """Text without the digits of its numbers."""
    return re.sub(r"\d+(?:\.\d+)?", "0", text)


def main():
    """Write the outputs of all notebooks."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        started = time.process_time()
        path.write_text(json.dumps(executed(path), indent=1, ensure_ascii=False) + "\n")
        print(f"{path.name}: {time.process_time() - started:.1f} s of CPU", file=sys.stderr)


if __name__ == "__main__":
    main()
