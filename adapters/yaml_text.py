"""YAML to plain data, for files that somebody else may have written: no tags, no aliases, no key twice, no depths, no
text that no file, header or JSON could carry on.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from typing import Any

import yaml

MAX_DEPTH = 32


class YamlError(ValueError):
    """One sentence that says why a text is not read."""


def read_yaml(text: bytes | str) -> object:
    """Raises `YamlError`."""
    try:
        _check_tokens(yaml.scan(text, Loader=yaml.SafeLoader))
        return yaml.load(text, Loader=_Loader)
    except YamlError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # ValueError: the 31st of February
        raise YamlError(f"This is not valid YAML: {' '.join(str(error).split())}.") from error


def _check_tokens(tokens: Iterable[yaml.Token]) -> None:
    """Aliases can grow a small file into gigabytes, and PyYAML takes the square of the depth to read brackets in
    brackets: nobody's file needs either."""
    depth = 0
    for token in tokens:
        if isinstance(token, yaml.AliasToken):
            raise YamlError("YAML aliases (`*name`) are not read here; write out what the name stands for.")
        if isinstance(token, yaml.TagToken):
            raise YamlError("YAML tags (`!!name`) are not read here; leave them out.")
        if isinstance(token, yaml.ScalarToken) and _UNUSABLE.search(token.value):
            where = token.start_mark.line + 1
            raise YamlError(f"The text on line {where} has a NUL or half of a surrogate pair in it; take it out.")
        depth += isinstance(token, _OPENINGS) - isinstance(token, _CLOSINGS)
        if depth > MAX_DEPTH:
            raise YamlError(f"It is nested more than {MAX_DEPTH} levels deep; make it flatter.")


_UNUSABLE = re.compile("[\0\ud800-\udfff]")
_OPENINGS = (
    yaml.BlockMappingStartToken, yaml.BlockSequenceStartToken, yaml.FlowMappingStartToken, yaml.FlowSequenceStartToken,
)  # fmt: skip
_CLOSINGS = (yaml.BlockEndToken, yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)


class _Loader(yaml.SafeLoader):
    """YAML's plain types. A key that is written twice is an error, where PyYAML keeps the last and says nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) != len(node.value):
            names = [key.value for key, _ in node.value]
            twice = next((name for name in names if names.count(name) > 1), names[-1])
            raise YamlError(f"The key `{twice}` is written twice in the part that begins on line {_line(node)}.")
        return mapping


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
