"""Hostile pushes: what a broken, careless or evil producer can put on a request list, drawn from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

from tokenmill.shared.protocol import Request

Draw = Callable[[random.Random, str], bytes]

HUGE_BYTES = 10 * 2**20
FIELDS = [*Request.__struct_fields__, "unknown"]
NUMBERS = ["NaN", "Infinity", "-Infinity", "nan", "1e400", "-1e400", "1e-400", "1e308", "0x10", "-0", "00", "01", "1."]
NUMBERS += [".5", "+1", "-", "1e", "9" * 400, "-" + "9" * 5000, "0." + "3" * 3000, "1e999999999999"]
NUMBERS += [str(2**31), str(2**53), str(2**63)]
LITERALS = ["null", "true", "false", "{}", "[]", '""', '"x"', "[[]]", '{"":{}}', '[null,1,"a",{}]', "0", "1.5", "-1"]
STRINGS = [
    *[r"\ud800", r"\udc00\ud800", r"\ud83d", r"\u0000", r"\uffff", r"\x41", "\\", r"\u12", "\x00", "\x01\x1f", "\n\r"],
    *["\x7f\x1b[31mred", "\u2028", "\u202e", "é" * 50, "{}", "%s%n", "$(id)", "'; DROP TABLE", "~", "*", "../../etc"],
]
IDS = ["", " ", "two words", "a{b}", "{}", "a\nb", "a\x00b", "é", "x" * 129, "x" * 60_000, "*", "[a-z]", "../x", "~"]


def draw_payload(rng: random.Random, request_id: str, good: Sequence[bytes]) -> bytes:
    """One push that most likely is no request, under an id of its own where it has one."""
    if rng.random() < 0.3:
        return _mutated(rng, rng.choice(good), request_id)
    return rng.choice(_KINDS)(rng, request_id)


def huge_payload(rng: random.Random, request_id: str) -> bytes:
    """Ten megabytes in one push."""
    text = rng.choice([b"x", b"[", b'{"a":', b"\xff", b'"', b"\\u0041", b" "])
    return _head(request_id) + b'"prompt":"' + text * (HUGE_BYTES // len(text)) + b'"}'


def _head(request_id: str) -> bytes:
    return b'{"id":"%s",' % request_id.encode()


def _one_field(rng: random.Random, request_id: str, value: str) -> bytes:
    """A request that is valid but for one field, whose value is written into the JSON as it is."""
    name = rng.choice(FIELDS)
    fields = {"id": f'"{request_id}"', "prompt": '"mill"', "max_tokens": "3"}
    if name == "messages":
        del fields["prompt"]
    members = [f'"{key}":{text}' for key, text in {**fields, name: value}.items()]
    if rng.random() < 0.3:
        rng.shuffle(members)
    return ("{" + ",".join(members) + "}").encode("utf-8", "surrogatepass")


def _wrong_value(rng: random.Random, request_id: str) -> bytes:
    return _one_field(rng, request_id, rng.choice(NUMBERS + LITERALS))


def _hostile_text(rng: random.Random, request_id: str) -> bytes:
    text = f'"{rng.choice(STRINGS)}"'
    wrapped = ["%s", "[%s]", "{%s:1}", "{%s:%s}", '[{"role":"user","content":%s}]', '[{"role":%s,"content":"x"}]']
    return _one_field(rng, request_id, rng.choice(wrapped).replace("%s", text))


def _nested(rng: random.Random, request_id: str) -> bytes:
    depth = rng.choice([10, 100, 500, 900, 990, 999, 1000, 1001, 5000, 50_000])
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}"), ('[{"prompt":', "}]")])
    return _one_field(rng, request_id, opening * depth + rng.choice(["1", "", '"x"']) + closing * depth)


def _long_list(rng: random.Random, request_id: str) -> bytes:
    item = rng.choice(["1", '"e"', "1e9", "null", '{"role":"user","content":"x"}', '"' + "ab" * 500 + '"'])
    return _one_field(rng, request_id, "[" + ",".join([item] * rng.choice([65, 1025, 3000])) + "]")


def _long_object(rng: random.Random, request_id: str) -> bytes:
    value = rng.choice(["1", "1e3", '"x"', "null"])
    return _one_field(rng, request_id, "{" + ",".join(f'"{n}":{value}' for n in range(rng.choice([300, 1025]))) + "}")


def _long_text(rng: random.Random, request_id: str) -> bytes:
    return _one_field(
        rng, request_id, '"' + rng.choice(["x", "é", r"\u0000"]) * rng.choice([3000, 40_000, 300_000]) + '"'
    )


def _hostile_id(rng: random.Random, request_id: str) -> bytes:
    name = rng.choice(IDS) + rng.choice(["", request_id])
    return json.dumps({"id": name, "prompt": "mill"}, ensure_ascii=rng.random() < 0.5).encode()


def _two_ids(rng: random.Random, request_id: str) -> bytes:
    other = rng.choice([f'"{request_id}-b"', "7", "null", '"a b"', f'"{request_id}"'])
    members = [f'"id":"{request_id}"', f'"id":{other}', '"prompt":"mill"', '"prompt":"again"', '"max_tokens":2']
    rng.shuffle(members)
    return ("{" + ",".join(members) + "}").encode()


def _invalid_utf8(rng: random.Random, request_id: str) -> bytes:
    text = rng.choice([b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xc0\xaf", b"\xe2\x82"])
    field = rng.choice([b'"prompt":"%s"', b'"%s":1,"prompt":"x"', b'"prompt":"x","stop":"%s"', b'%s"prompt":"x"'])
    return _head(request_id) + field.replace(b"%s", text) + b"}"


def _no_object(rng: random.Random, request_id: str) -> bytes:
    texts = [*LITERALS, *NUMBERS, "", " ", "\n", "PING", "*1\r\n$4\r\nPING\r\n", "[" * 100_000, "<xml/>", request_id]
    return rng.choice(texts).encode()


def _noise(rng: random.Random, request_id: str) -> bytes:
    return rng.randbytes(rng.choice([1, 7, 100, 2000])) + request_id.encode()


def _other_encoding(rng: random.Random, request_id: str) -> bytes:
    text = json.dumps({"id": request_id, "prompt": "mill"})
    return rng.choice(
        [
            text.encode("utf-16"),
            text.encode("utf-8-sig"),
            f"// comment\n{text}".encode(),
            f"{text[:-1]},}}".encode(),
            f"{text}{text}".encode(),
            text.replace('"', "'").encode(),
            b"\x80\x04\x95" + text.encode(),  # as a pickle begins
            f"{text}\x00".encode(),
        ]
    )


def _mutated(rng: random.Random, payload: bytes, request_id: str) -> bytes:
    """A good request under another id, with some of its bytes cut, doubled or replaced; or cut short."""
    body = bytearray(_head(request_id) + payload.split(b",", 1)[1].lstrip())
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(body) + 1), rng.randint(1, 8)
        change = rng.randrange(5)
        if change == 0:
            del body[at:]
        elif change == 1:
            del body[at : at + length]
        elif change == 2:
            body[at:at] = body[at : at + length]
        elif change == 3:
            body[at : at + 1] = rng.randbytes(1)
        else:
            body[at:at] = rng.choice([b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"0", b"-", b"null", b"e9"])
    return bytes(body)


_KINDS: list[Draw] = [
    *[_wrong_value, _wrong_value, _hostile_text, _hostile_text, _nested, _long_list, _long_object, _long_text],
    *[_hostile_id, _two_ids, _invalid_utf8, _no_object, _noise, _other_encoding],
]
