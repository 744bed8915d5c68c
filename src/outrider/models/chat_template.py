"""Chat templates: Jinja in a sandbox, with the few additions that templates in the wild rely on.

Source: transformers' chat templating page: trim_blocks and lstrip_blocks, `raise_exception`, `strftime_now`,
a `tojson` that keeps characters and key order, loop controls, and `{% generation %}` around an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from outrider.models.errors import ModelError

if TYPE_CHECKING:
    import jinja2

__all__ = ["ChatTemplate"]


class ChatTemplate:
    """One template and the token texts that it may name, such as `bos_token`. Compiled when first used."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source = source
        self.tokens = dict(tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for the messages. `variables` are the template's own, such as `tools`.

        Raises ModelError if the template is broken or refuses the messages, with the template's own reason.
        """
        import jinja2

        known = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._compiled.render({**self.tokens, **known, **(variables or {})})
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template is broken at line {error.lineno}: {error.message}") from None
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise ModelError(f"the chat template refuses these messages: {error}") from None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation()]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self.source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _generation() -> type[jinja2.ext.Extension]:
    """`{% generation %} ... {% endgeneration %}` marks an answer for training; a prompt shows its inside as it is."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja2's own way to declare it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation
