"""What a run tells about itself: through DeepSpeed's monitor, and in a log that ``ds-galore report`` reads."""
