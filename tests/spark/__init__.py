"""Spark on real brokers. One session per process, since a process has one JVM."""
