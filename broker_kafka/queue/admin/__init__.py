"""Inspection, administration and purging of queues with markers, and the standalone tracker."""
