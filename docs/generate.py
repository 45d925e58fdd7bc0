"""``make docs``: write ``protocol.schema.json`` and the field tables of ``protocol.md`` from ``shared/protocol.py``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.shared.protocol import Reply, Request, SamplingParams

FOLDER = Path(__file__).parent
SCHEMA, PAGE = FOLDER / "protocol.schema.json", FOLDER / "protocol.md"
_TABLE = re.compile(r"(<!-- fields: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_LIMITS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "not empty",
    "maxItems": "up to {}",
    "maxProperties": "up to {}",
}


def schema() -> dict[str, Any]:
    """The wire format as JSON Schema; each message is one of its ``$defs``."""
    _, parts = msgspec.json.schema_components([Request, Reply])
    parts = {name: {**part, "description": part["description"].split("\n")[0]} for name, part in parts.items()}
    parts["Request"]["oneOf"] = [{"required": ["prompt"]}, {"required": ["messages"]}]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Tokenmill wire format",
        "oneOf": [{"$ref": "#/$defs/Request"}, {"$ref": "#/$defs/Reply"}],
        "$defs": parts,
    }


def schema_text() -> str:
    """What stands in ``protocol.schema.json``."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def page_text(page: str) -> str:
    """The page with its tables made anew."""
    parts = schema()["$defs"]
    fields = parts["Request"]["properties"]
    sampling = {name: fields.pop(name) for name in SamplingParams.__struct_fields__}  # a table of their own
    parts["SamplingParams"] = {"properties": sampling}
    return _TABLE.sub(lambda found: found[1] + _table(parts[found[2]]) + found[3], page)


def _table(part: dict[str, Any]) -> str:
    required = part.get("required", [])
    names = sorted(part["properties"], key=lambda name: name not in required)
    rows = [
        f"| `{name}` | {_kind(field)} | {_default(field, required=name in required)} | {field['description']} |\n"
        for name in names
        for field in [part["properties"][name]]
    ]
    return "| field | JSON | default | meaning |\n|---|---|---|---|\n" + "".join(rows)


def _kind(field: dict[str, Any]) -> str:
    """Type and limits of a field, for people."""
    if "anyOf" in field:
        return " or ".join(kind for one in field["anyOf"] if (kind := _kind(one)) != "null")
    if "$ref" in field:
        return f"`{field['$ref'].rpartition('/')[2]}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    kind = str(field["type"])
    for key in ("items", "additionalProperties"):
        if isinstance(part := field.get(key), dict):
            kind += f" of ({inner})" if "," in (inner := _kind(part)) else f" of {inner}"
    if "pattern" in field:
        kind += f" `{field['pattern'][1:-1]}`"
    limits = [text.format(_number(field[key])) for key, text in _LIMITS.items() if key in field]
    return ", ".join([kind, *limits])


def _number(value: float) -> str:
    """A limit; those at the ends of integers of 31, 53 or 64 bits as powers of two."""
    power = 2 ** (int(abs(value)).bit_length() - 1)
    if power < 2**30:
        return f"{value:g}"
    return f"{'-' * (value < 0)}2^{power.bit_length() - 1}" if abs(value) == power else f"2^{power.bit_length()} - 1"


def _default(field: dict[str, Any], *, required: bool) -> str:
    if required:
        return "required"
    value = field.get("default")
    return "" if value is None else f"`{json.dumps(value)}`"


def main() -> None:
    """Write both files."""
    SCHEMA.write_text(schema_text())
    PAGE.write_text(page_text(PAGE.read_text()))


if __name__ == "__main__":
    main()
