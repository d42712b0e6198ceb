"""Runs untrusted Python programs. `slea_llm.sandbox.runner` is the entrance; docs/sandbox.md says what it promises."""
