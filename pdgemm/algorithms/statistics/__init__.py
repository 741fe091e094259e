"""Elements in order and without NaN; `pdgemm.statistics` has them for users."""
