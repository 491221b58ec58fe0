"""The method: noise, model, data, objective, training, composition, evaluation. Knows nothing of the wire."""
