"""The walkthrough's code, run in order: what it prints must be what the page says."""

import doctest
import io
from pathlib import Path

WALKTHROUGH = Path(__file__).parents[2] / "docs" / "walkthrough.md"
EXAMPLES_AT_LEAST = 40


def python_blocks(text: str) -> str:
    """Blank every line outside of Python blocks, so that reported line numbers are the page's."""
    lines, inside = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            lines.append("")
        else:
            lines.append(line if inside else "")
    return "\n".join(lines) + "\n"


def test_the_page_says_what_the_code_prints():
    source = python_blocks(WALKTHROUGH.read_text())
    examples = doctest.DocTestParser().get_doctest(
        source, {}, WALKTHROUGH.name, str(WALKTHROUGH), 0
    )
    report = io.StringIO()
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples, out=report.write)
    assert result.failed == 0, report.getvalue()
    assert result.attempted >= EXAMPLES_AT_LEAST, "blocks were not found"
