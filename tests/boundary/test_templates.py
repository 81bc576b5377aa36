"""Templates from outside have little time and memory, whatever they do with it."""

from __future__ import annotations

import time

import pytest

from penstock.boundary import templates
from penstock.data.text.chat import PLAIN, Template
from penstock.errors import ConfigError

MESSAGES = [{"role": "user", "content": "hi"}]
HOSTILE = {
    "endless loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "long text": "{{ messages[0]['content'] * 1000000000 }}",
    "long text of a constant": "{{ 'a' * 10000000000 }}",
    "wide format": "{{ '%1000000000s'|format('x') }}",
    "growing text": "{% set n = namespace(s='a') %}{% for i in range(40) %}{% set n.s = n.s~n.s %}{% endfor %}{{ n }}",
    "large power": "{% set x = messages|length + 8 %}{{ (10 ** (x ** x)) is even }}",
    "calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nested deeply": "{% if true %}" * 3000 + "{% endif %}" * 3000,
    "nested brackets": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "many words": "{{ lipsum(n=100000000) }}",
    "Python's insides": "{{ messages.__class__.__mro__ }}",
    "a file": "{% include '/etc/passwd' %}",
    "a broken template": "{% for %}",
    "what it raises itself": "{{ raise_exception('roles must alternate') }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_has_no_end_is_refused_in_a_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.3)
    begun = time.process_time()
    with pytest.raises(ConfigError, match="chat template") as refused:
        Template(HOSTILE[name], {"eos_token": "</s>"}).text(MESSAGES)
    assert len(str(refused.value)) < 300
    assert time.process_time() - begun < 1, "it ran in this process"
    monkeypatch.undo()
    assert Template(PLAIN, {"eos_token": "."}).text(MESSAGES) == "<|user|>\nhi.\n<|assistant|>\n"


def test_texts_of_any_characters_arrive() -> None:
    said = "\ud83d \x00 😀 \n\u2028"
    text = Template("{{ messages[0].content }}{{ bos_token }}", {"bos_token": "é"}).text([{"content": said}])
    assert text == said + "é"
