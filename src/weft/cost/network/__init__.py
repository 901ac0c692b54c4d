"""Seconds of messages and collectives."""
