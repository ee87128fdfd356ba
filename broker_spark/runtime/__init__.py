"""Spark's JVM, its Python workers, and the shipping of packages to them."""
