"""The copy of a run's folder in a bucket, from which a machine without that folder resumes."""
