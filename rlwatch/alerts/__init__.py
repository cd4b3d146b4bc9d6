"""From findings to people: rules, episodes, an outbox that survives the process, delivery."""
