"""Draft-head training: response regeneration, the feature store, masks, losses and the trainer."""
