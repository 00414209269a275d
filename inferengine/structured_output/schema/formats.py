"""The `format` names that are enforced, as expressions of ECMA-262. Any other name is annotation, as the specification
says of all."""

from __future__ import annotations

_MONTHS_DAYS = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
)
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = rf"(?:\d{{4}}-{_MONTHS_DAYS}|{_LEAP_YEAR}-02-29)"
_ZONE = r"(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_TIME = rf"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{{1,9}})?{_ZONE}"
_ALNUM, _INNER = "[A-Za-z0-9]", "[A-Za-z0-9-]"
# No -- at the third place: such labels are encoded, and what they encode has rules of its own.
_LABEL = f"{_ALNUM}(?:(?:{_INNER}?|{_INNER}{_ALNUM}{_INNER}{{0,59}}|{_INNER}-(?:{_ALNUM}{_INNER}{{0,58}})?){_ALNUM})?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [
        f"(?:{_H}:){{7}}{_H}",
        f"(?:{_H}:){{6}}{_IPV4}",
        *(f"(?:{_H}(?::{_H}){{0,{left}}})?::(?:{_H}(?::{_H}){{0,{5 - left}}})?" for left in range(6)),
        *(f"(?:{_H}(?::{_H}){{0,{left}}})?::(?:{_H}:){{0,{4 - left}}}{_IPV4}" for left in range(5)),
        f"(?:{_H}(?::{_H}){{0,6}})::",
        f"::{_H}(?::{_H}){{0,6}}",
    ]
)
_PART = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})"
_FIRST = r"(?:/[A-Za-z0-9._~!$&'()*+,;=:@-]|[A-Za-z0-9._~!$&'()*+,;=:@?-]|%[0-9A-Fa-f]{2})"
_USER = r"(?:[A-Za-z0-9._~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2})*"
_NAME = r"(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*"
_CLOCK = r"T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[Tt]{_TIME}",
    "duration": rf"P(?:\d+W|{_CLOCK}|(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)(?:{_CLOCK})?)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(?://(?:{_USER}@)?(?:{_NAME}|\[(?:{_IPV6})\])(?::\d*)?(?:[/?]{_PART}*)?"
    rf"|{_FIRST}{_PART}*)(?:#{_PART}*)?",
}


def pattern_of(name: str) -> str | None:
    """Return the expression that a whole text of this format matches; None: it is annotation."""
    found = FORMATS.get(name)
    return None if found is None else f"^(?:{found})$"
