"""Notification channels: one module for each kind, none of which reveals a secret such as an address or a token."""
