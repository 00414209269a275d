"""Refusal: what a schema asks for and no grammar here can hold to, by name, with what to write instead."""

from __future__ import annotations


class Refusal(ValueError):
    """The keyword, what is the matter, and the remedy, as one sentence without its subject."""
