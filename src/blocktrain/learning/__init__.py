"""The method: model, data, training, composition, text, evaluation. Knows no network."""
