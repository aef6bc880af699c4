"""Chat templates as some models have them."""

from __future__ import annotations

STRICT = """{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}
{{ message['content'] }}{% endfor %}"""
"""Refuses conversations in which the user and the assistant do not alternate."""

WITHOUT_THOUGHTS = (
    "{% for message in messages %}{{ '[' + message['role'] + ']' }}"
    "{{ message['content'].split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]<think>' }}{% endif %}"
)
"""Begins answers with thoughts, and renders the answers without them."""
