"""The version of Orcinus, of which packages, images and manifests have theirs."""

VERSION = "0.1.0"
