//! Parses the entries of the setting `devices`: a GPU's UUID, NVML index or PCI address.
//!
//! Operators say with the setting which GPUs the engine runs on. `config` parses the entries to
//! check them, and `gpu` uses them. This module doesn't check that such a GPU exists.

use std::{fmt, str::FromStr};

/// One entry of the setting `devices`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selector {
    /// The UUID of a GPU or of a MIG slice.
    Uuid(String),
    /// The index of a GPU in NVML.
    Index(u32),
    /// The PCI address of a GPU.
    Pci(PciAddress),
}

/// A PCI address: domain, bus, device, function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PciAddress(u32, u8, u8, u8);

/// An error: a text has none of the three forms of a [`Selector`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no GPU: give a UUID (GPU-… or MIG-…), an index, or a PCI address")]
pub struct Error(String);

impl FromStr for PciAddress {
    type Err = Error;

    /// Parses an address such as `0000:1b:00.0` or `1b:00.0`, where all numbers are hexadecimal.
    /// Without a domain, the domain is 0.
    fn from_str(text: &str) -> Result<Self, Error> {
        let to_error = || Error(text.to_owned());
        let parse_byte = |text: &str| u8::from_str_radix(text, 16).map_err(|_| to_error());
        let (slot, function) = text.rsplit_once('.').ok_or_else(to_error)?;
        let (domain_and_bus, device) = slot.rsplit_once(':').ok_or_else(to_error)?;
        let (domain, bus) = domain_and_bus.rsplit_once(':').unwrap_or(("0", domain_and_bus));
        let domain = u32::from_str_radix(domain, 16).map_err(|_| to_error())?;
        Ok(Self(domain, parse_byte(bus)?, parse_byte(device)?, parse_byte(function)?))
    }
}

impl fmt::Display for PciAddress {
    /// Formats the address as in `/sys/bus/pci/devices`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(domain, bus, device, function) = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

impl FromStr for Selector {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        if text.starts_with("GPU-") || text.starts_with("MIG-") {
            return Ok(Self::Uuid(text.to_owned()));
        }
        if let Ok(index) = text.parse() {
            return Ok(Self::Index(index));
        }
        text.parse().map(Self::Pci)
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uuid(uuid) => f.write_str(uuid),
            Self::Index(index) => index.fmt(f),
            Self::Pci(address) => address.fmt(f),
        }
    }
}
