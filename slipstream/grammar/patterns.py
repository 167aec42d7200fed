r"""Replaces patterns with lookaheads, which libraries write for their types, by patterns without: llguidance has no
lookaheads. And formats of JSON Schema that llguidance does not know, as patterns.

Rules:
1. A replacement matches no text that the original does not. For Zod's patterns it matches the same; for Pydantic's
   decimals it may match less: a number must begin with a digit, and some splits before and after the point are left
   out.
2. An unknown pattern stays as it is, and llguidance accepts or refuses it.
3. A URI's host is a name or an IPv4 address, without a user name before it.

It knows nothing about schemas.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_SPLIT_DIGITS = 40  # up to so many digits the decimal point may be anywhere
_ATOM, _HOST = r"[A-Za-z0-9_'+-]", r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
_TIME = r"T(\d+H(\d+M)?(\d+([.,]\d+)?S)?|\d+M(\d+([.,]\d+)?S)?|\d+([.,]\d+)?S)"
_LOCAL = rf"^({_ATOM}+\.)*{_ATOM}*[A-Za-z0-9_+-]"
REPLACEMENTS = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]" + _HOST: _LOCAL + _HOST,
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$":
        rf"^P(\d+W|(\d+Y(\d+M)?(\d+D)?|\d+M(\d+D)?|\d+D)({_TIME})?|{_TIME})$",
}


def _reference(scheme: str, extra: str = "") -> str:
    """A URI. scheme: "?" if it may lack one; extra: characters that an IRI may have besides."""
    character = f"[A-Za-z0-9._~!$&'()*+,;=@{extra}-]|%[0-9A-Fa-f]{{2}}"
    in_path, query = f"({character}|:)", f"({character}|[:/?])*"
    path, host = f"(/{in_path}*)*", f"//[A-Za-z0-9{extra}]([A-Za-z0-9._~{extra}-]*[A-Za-z0-9{extra}])?(:[0-9]{{1,5}})?"
    any_scheme = "[A-Za-z][A-Za-z0-9+.-]*:"
    absolute = f"({any_scheme}){scheme}({host}{path}|/({in_path}+{path})?)|{any_scheme}(///)?{in_path}+{path}"
    relative = f"|({character})+{path}|" if scheme else ""
    return rf"^({absolute}{relative})(\?{query})?(#{query})?$"


_POINTER, _NAME = "(/([^/~]|~[01])*)*", r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*(\*|:[1-9][0-9]{0,3})?"
_IRI = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
FORMAT_PATTERNS = {
    "uri-reference": _reference("?"), "iri": _reference("", _IRI), "iri-reference": _reference("?", _IRI),
    "json-pointer": f"^{_POINTER}$", "relative-json-pointer": f"^(0|[1-9][0-9]*)(#|{_POINTER})$",
    "uri-template": r"^([A-Za-z0-9._~!$&()*+,;=@:/?#-]|%[0-9A-Fa-f]{2}|\{[+#./;?&]?" rf"{_NAME}(,{_NAME})*\}})*$"}
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY = ("([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|"
        f"02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)")
_HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]"
# Of names, for which llguidance knows patterns alone.
NAME_FORMATS = {"uuid": "^[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$", "date": f"^{_DAY}$",
                "date-time": rf"^{_DAY}T{_HOUR}:[0-5][0-9](\.[0-9]+)?(Z|[+-]{_HOUR})$", "uri": _reference(""),
                "email": rf"{_LOCAL}@([A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z]{{2,}}$"}
# Patterns that Zod 4 and Effect write beside a format: whatever they match has it.
_HEX = re.escape("[0-9a-fA-F]")
_KEY = (rf"{_HEX}\{{8\}}-{_HEX}\{{4\}}-((\[1-8\]|[1-8]){_HEX}\{{3\}}|{_HEX}\{{4\}})-"
        rf"(\[89abAB\]{_HEX}\{{3\}}|{_HEX}\{{4\}})-{_HEX}\{{12\}}")
_ZOD_DAY = (r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-(?:(?:"
            r"0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])))")
_ZOD_MOMENT = rf"{_ZOD_DAY}T(?:(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:Z))$"
_ZOD_EMAIL = (r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+"
              "[A-Za-z]{2,}$")
# And those that match more than a format's pattern above.
WIDER = {"email": (_LOCAL + _HOST, _ZOD_EMAIL)}
IMPLYING = {"uuid": re.compile(rf"\^({_KEY}|\({_KEY}(\|[0f]{{8}}(-[0f]{{4}}){{3}}-[0f]{{12}})*\))\$"),
            "date": re.compile(re.escape(f"{_ZOD_DAY}$")), "date-time": re.compile(re.escape(_ZOD_MOMENT))}
STRICTER_FORMATS = {"idn-email": "email", "idn-hostname": "hostname"}


def without_lookaheads(pattern: str) -> str:
    """An equal or stricter pattern without lookaheads; ``pattern`` itself if it is not a known one."""
    if (replacement := REPLACEMENTS.get(pattern)) is not None:
        return replacement
    for form, replace in DECIMALS:
        if match := form.fullmatch(pattern):
            return replace(*map(int, match.groups()))
    return pattern


def _decimal(integer_digits: int, places: int) -> str:
    """At most ``integer_digits`` digits before the point, leading zeros not counted, and ``places`` behind it."""
    digits = rf"(0*\d{{1,{integer_digits}}}|0+)" if integer_digits else "0+"
    return rf"^[+-]?{digits}(\.\d{{0,{places}}}0*)?$"


def _digits(most: int) -> str:
    """At most ``most`` digits in all."""
    if most > MAX_SPLIT_DIGITS:
        return rf"^[+-]?\d{{1,{most}}}$"
    split = "|".join(rf"\d{{{integer_digits}}}\.\d{{0,{most - integer_digits}}}"
                     for integer_digits in range(1, most + 1))
    return rf"^[+-]?(0*\d{{1,{most}}}|{split})$"


def _pydantic_form(ending: str) -> re.Pattern[str]:
    """A pattern that matches Pydantic's patterns; "#" stands for a number."""
    return re.compile(re.escape(rf"^(?!^[-+.]*$)[+-]?0*{ending}").replace(r"\#", r"(\d{1,6})"))


DECIMALS: tuple[tuple[re.Pattern[str], Callable[..., str]], ...] = (
    (_pydantic_form(r"\d*\.?\d*$"), lambda: r"^[+-]?\d+(\.\d*)?$"),
    (_pydantic_form(r"\d*\.?\d{0,#}0*$"), lambda places: rf"^[+-]?\d+(\.\d{{0,{places}}}0*)?$"),
    (_pydantic_form(r"(?:\d{0,#}|(?=[\d.]{1,#}0*$)\d{0,#}\.\d{0,#}0*$)"), lambda integer_digits, most, _, places:
        _decimal(integer_digits, min(places, most - 1 - integer_digits) if most - 1 > integer_digits else 0)),
    (_pydantic_form(r"(?:\d{0,#}|(?=[\d.]{1,#}0*$)\d*\.\d*0*$)"), lambda most, _: _digits(most)),
)
