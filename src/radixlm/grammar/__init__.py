"""Structured output: grammars compiled into matchers that say which tokens may come next. No torch."""
