"""Settings -> task, judge, model, engine and run, for training, evaluation, chat and server."""
