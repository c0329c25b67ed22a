"""The version of Orcinus. The versions of packages, images and manifests are taken from here."""

VERSION = "0.1.0"
