"""The reference target: eager torch in float32, the truth that the others are held against."""
