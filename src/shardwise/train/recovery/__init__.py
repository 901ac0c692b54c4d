"""What a training run does about failed, slow and corrupted ranks."""
