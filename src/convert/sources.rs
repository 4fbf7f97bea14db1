//! Sets of source addresses. A rule on sources becomes `from` by their union and difference, written as the fewest blocks.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Ranges with their ends, in order; no two of them touch.
type Ranges = Vec<(u128, u128)>;

/// A set of source addresses of both families.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Sources {
    v4: Ranges,
    v6: Ranges,
}

/// The addresses of IPv6 that stand for those of IPv4: mapped and compatible ones (RFC 4291), and 6to4 (RFC 3056).
const MAPPED: (u128, u128) = (0xffff << 32, 0xffff_ffff_ffff);
const COMPATIBLE: (u128, u128) = (0, 0xffff_ffff);
const SIX_TO_FOUR: (u128, u128) = (0x2002 << 112, (0x2003 << 112) - 1);

/// The blocks of IPv6 that clients can have: global, private, of the link and of the host, and of translators (RFC 6052).
const OF_CLIENTS: [&str; 5] = ["::1", "64:ff9b::/32", "2000::/3", "fc00::/7", "fe80::/10"];

/// A set of sources as the config writes it, in the shorter of two ways; both empty: all that can come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Written {
    /// The value of `from`.
    pub(super) from: Vec<String>,
    /// The value of `exceptFrom`.
    pub(super) except: Vec<String>,
}

impl Sources {
    pub(super) fn all() -> Self {
        Self { v4: vec![(0, u32::MAX.into())], v6: vec![(0, u128::MAX)] }
    }

    /// Returns all addresses of one family, or of both.
    pub(super) fn of_families(v4: bool, v6: bool) -> Self {
        let all = Self::all();
        Self { v4: if v4 { all.v4 } else { Vec::new() }, v6: if v6 { all.v6 } else { Vec::new() } }
    }

    /// Returns the addresses of a block, or a single address; `None` if the text is neither.
    pub(super) fn block(text: &str) -> Option<Self> {
        let (address, length) =
            text.split_once('/').map_or((text, None), |(address, length)| (address, Some(length)));
        let address: IpAddr = address.parse().ok()?;
        let whole = if address.is_ipv4() { 32 } else { 128 };
        let length =
            length.map_or(Some(whole), |length| length.parse().ok()).filter(|length| *length <= whole)?;
        let open = u128::MAX.checked_shr(128 - whole + length).unwrap_or(0);
        let range = |bits: u128| vec![(bits & !open, bits | open)];
        Some(match address {
            IpAddr::V4(ip) => Self { v4: range(u32::from(ip).into()), v6: Vec::new() },
            IpAddr::V6(ip) => Self { v4: Vec::new(), v6: range(ip.into()) },
        })
    }

    /// Returns the set with the addresses of the other family that a program may treat as members: HAProxy compares an address of IPv6
    /// that stands for one of IPv4 with blocks of IPv4, and both programs an address of IPv4 in its mapped form with blocks of IPv6.
    pub(super) fn with_kin(&self) -> Self {
        let mut kin = self.clone();
        if !self.v4.is_empty() {
            kin.v6 = union(&union(&kin.v6, &self.v4), &[SIX_TO_FOUR]);
        }
        let of_v4 = minus(&[MAPPED], &minus(&[MAPPED], &self.v6));
        let of_v4: Ranges = of_v4.iter().map(|(low, high)| (low - MAPPED.0, high - MAPPED.0)).collect();
        kin.v4 = union(&kin.v4, &of_v4);
        kin
    }

    /// Returns the set without addresses of IPv6 that stand for addresses of IPv4, which hardly any client has.
    pub(super) fn without_kin(&self) -> Self {
        let v6 =
            [MAPPED, COMPATIBLE, SIX_TO_FOUR].iter().fold(self.v6.clone(), |v6, kin| minus(&v6, &[*kin]));
        Self { v4: self.v4.clone(), v6 }
    }

    pub(super) fn is_none(&self) -> bool {
        self.v4.is_empty() && self.v6.is_empty()
    }

    pub(super) fn union(&self, other: &Self) -> Self {
        Self { v4: union(&self.v4, &other.v4), v6: union(&self.v6, &other.v6) }
    }

    pub(super) fn minus(&self, other: &Self) -> Self {
        Self { v4: minus(&self.v4, &other.v4), v6: minus(&self.v6, &other.v6) }
    }

    pub(super) fn and(&self, other: &Self) -> Self {
        self.minus(&self.minus(other))
    }

    pub(super) fn contains_all(&self, other: &Self) -> bool {
        other.minus(self).is_none()
    }

    /// Returns the fewest blocks that have exactly these addresses of clients.
    pub(super) fn blocks(&self) -> Vec<String> {
        let v4 = self.v4.iter().flat_map(|range| blocks(*range, 32));
        let of_clients = OF_CLIENTS.iter().filter_map(|text| Self::block(text));
        let of_clients = of_clients.fold(Self::default(), |all, one| all.union(&one)).v6;
        let is_whole = self.v6 == Self::all().v6;
        let v6 = if is_whole { self.v6.clone() } else { minus(&of_clients, &minus(&of_clients, &self.v6)) };
        let v6 = v6.iter().flat_map(|range| blocks(*range, 128));
        v4.map(v4_block).chain(v6.map(v6_block)).collect()
    }

    /// Returns the set as the config writes it; `all` has the sources that can come.
    pub(super) fn written(&self, all: &Self) -> Written {
        if self == all {
            return Written::default();
        }
        let rest = all.minus(self);
        let v4 = rest.v4.iter().flat_map(|range| blocks(*range, 32)).map(v4_block);
        let v6 = rest.v6.iter().flat_map(|range| blocks(*range, 128)).map(v6_block);
        let (from, except): (Vec<String>, Vec<String>) = (self.blocks(), v4.chain(v6).collect());
        // Without `from`, all sources would come.
        match from.is_empty() || except.len() < from.len() {
            true => Written { from: Vec::new(), except },
            false => Written { from, except: Vec::new() },
        }
    }
}

fn v4_block((bits, length): (u128, u32)) -> String {
    format!("{}/{length}", Ipv4Addr::from(u32::try_from(bits).unwrap_or(u32::MAX)))
}

fn v6_block((bits, length): (u128, u32)) -> String {
    format!("{}/{length}", Ipv6Addr::from(bits))
}

fn union(one: &[(u128, u128)], other: &[(u128, u128)]) -> Ranges {
    let mut all: Ranges = one.iter().chain(other).copied().collect();
    all.sort_unstable();
    let mut joined: Ranges = Vec::with_capacity(all.len());
    for (low, high) in all {
        match joined.last_mut() {
            Some((_, last)) if low <= last.saturating_add(1) => *last = high.max(*last),
            _ => joined.push((low, high)),
        }
    }
    joined
}

fn minus(of: &[(u128, u128)], taken: &[(u128, u128)]) -> Ranges {
    let mut left = Vec::new();
    for (low, high) in of {
        let mut next = Some(*low);
        for (from, to) in taken.iter().filter(|(from, to)| from <= high && to >= low) {
            let Some(start) = next else { break };
            if *from > start {
                left.push((start, from - 1));
            }
            next = to.checked_add(1).filter(|next| next <= high);
        }
        left.extend(next.map(|start| (start, *high)));
    }
    left
}

/// Returns the fewest blocks of a range, as their first address and their length, for addresses of so many bits.
fn blocks((low, high): (u128, u128), bits: u32) -> Vec<(u128, u32)> {
    let mut all = Vec::new();
    let mut next = Some(low);
    while let Some(start) = next {
        // The largest block that begins here and ends in the range: `size` is the number of its open bits.
        let aligned = start.trailing_zeros().min(bits);
        let size = (0..=aligned).rev().find(|size| end(start, *size) <= high).unwrap_or(0);
        all.push((start, bits - size));
        next = end(start, size).checked_add(1).filter(|next| *next <= high);
    }
    all
}

/// Returns the last address of a block.
fn end(start: u128, size: u32) -> u128 {
    start | u128::MAX.checked_shr(128 - size).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(blocks: &[&str]) -> Sources {
        let each = blocks.iter().map(|text| Sources::block(text).expect("a block"));
        each.fold(Sources::default(), |all, one| all.union(&one))
    }

    #[test]
    fn the_complement_of_blocks_is_blocks() {
        let v4 = Sources::of_families(true, false);
        for (taken, left) in [
            (&["128.0.0.0/1"][..], &["0.0.0.0/1"][..]),
            (&["0.0.0.0/2", "64.0.0.0/2"], &["128.0.0.0/1"]),
            (
                &["10.0.0.0/8"],
                &[
                    "0.0.0.0/5",
                    "8.0.0.0/7",
                    "11.0.0.0/8",
                    "12.0.0.0/6",
                    "16.0.0.0/4",
                    "32.0.0.0/3",
                    "64.0.0.0/2",
                    "128.0.0.0/1",
                ],
            ),
            (&["0.0.0.0/0"], &[]),
            (&[], &["0.0.0.0/0"]),
        ] {
            let rest = v4.minus(&of(taken));
            assert_eq!(rest.blocks(), left, "{taken:?}");
            assert_eq!(rest.union(&of(taken)), v4, "{taken:?}");
        }
        assert_eq!(Sources::all().blocks(), ["0.0.0.0/0", "::/0"]);
        assert_eq!(of(&["10.0.0.7/8", "::1", "::/100"]).blocks(), ["10.0.0.0/8", "::1/128"]);
        let last = of(&["ffff::/16"]);
        assert_eq!(Sources::all().minus(&last).and(&last), Sources::default());
        assert!(Sources::block("10.0.0.0/33").is_none() && Sources::block("a").is_none());
    }

    #[test]
    fn sources_are_written_in_the_shorter_way() {
        let v4 = Sources::of_families(true, false);
        assert_eq!(v4.written(&v4), Written::default());
        let office = of(&["10.0.0.0/8"]);
        assert_eq!(office.written(&v4), Written { from: vec!["10.0.0.0/8".to_owned()], except: Vec::new() });
        let others = v4.minus(&office);
        assert_eq!(others.written(&v4), Written { from: Vec::new(), except: vec!["10.0.0.0/8".to_owned()] });
        // Sources that count as members are refused, too.
        let rest = Sources::all().minus(&office.with_kin()).written(&Sources::all());
        assert_eq!(
            (rest.from.len(), &rest.except[..1], rest.except.len()),
            (0, &["10.0.0.0/8".to_owned()][..], 3)
        );
    }

    #[test]
    fn addresses_of_the_other_family_may_count_as_members() {
        let kin = of(&["10.0.0.0/8"]).with_kin();
        for block in ["10.0.0.0/8", "2002:a00::/24", "2002::/16", "::10.0.0.0/104"] {
            assert!(kin.contains_all(&of(&[block])), "{block}");
        }
        assert_eq!(kin.without_kin(), of(&["10.0.0.0/8"]));
        assert!(!kin.contains_all(&of(&["2003::/16"])) && !kin.contains_all(&of(&["2001:db8::/32"])));
        let rest = Sources::all().minus(&of(&["0.0.0.0/0"]).with_kin()).blocks();
        assert!(rest.contains(&"fe80::/10".to_owned()) && !rest.contains(&"::1/128".to_owned()), "{rest:?}");
        assert!(of(&["::/0"]).with_kin().contains_all(&of(&["0.0.0.0/0"])));
        assert!(!of(&["2001:db8::/32"]).with_kin().contains_all(&of(&["10.0.0.0/32"])));
    }
}
