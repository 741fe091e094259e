"""Published numbers, one table a file as their authors print them, beside the predictions of plans."""
