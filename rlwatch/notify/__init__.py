"""Channels to the outside: one file each, none of them lets a secret out."""
