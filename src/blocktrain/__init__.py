"""BlockTrain: train one language model together on machines that never meet."""
