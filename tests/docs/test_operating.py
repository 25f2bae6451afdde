"""The errors that the guide for operating lists are said by the code, as they stand there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "operating.md"


def said_by_the_code() -> str:
    """All text in the package's code, a line each; `...` is in the place of values."""
    texts = []
    for path in (ROOT / "megatron_ext").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%\w", "...", node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = (getattr(part, "value", "...") for part in node.values)
                texts.append("".join(part if isinstance(part, str) else "..." for part in parts))
    return "\n".join(texts)


def quoted() -> list[str]:
    """The messages in the first column of the guide's tables."""
    rows = [line for line in GUIDE.read_text().splitlines() if line.startswith("| `")]
    cells = [row.split(" | ")[0].removeprefix("| ") for row in rows]
    return [text for cell in cells for text in re.split(r"(?<=`) \.\.\. (?=`)", cell)]


def test_messages_are_the_codes() -> None:
    code = said_by_the_code()
    messages = [message.strip("`") for message in quoted()]
    assert len(messages) > 30
    for message in messages:
        # In the code values may touch: what is `...` here may be several there.
        pattern = re.escape(message).replace(r"\.\.\.", r"[^\n]*")
        assert re.search(pattern, code), message
        assert len(message.replace("...", "").strip()) > 15, message
