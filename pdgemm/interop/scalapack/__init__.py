"""ScaLAPACK's routines with its arguments; `pdgemm.scalapack` has them for users."""
