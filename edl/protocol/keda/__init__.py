"""KEDA's wire types, from its protocol for external scalers. What does not belong here: answers to its calls."""
