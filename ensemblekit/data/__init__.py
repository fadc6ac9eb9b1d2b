"""Data sets become seeded batches on a device: loading, splitting, decoding, resizing, augmentation.

Uses `core` and `spec`. Start with `loading.py`: `load_data` turns any data set plugin into a `Data` of three splits.
`augmentation.py` has the built-in augmentations, which are plugins.
"""
