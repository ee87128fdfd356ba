"""Tracker."""
