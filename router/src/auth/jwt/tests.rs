//! Tests of tokens: which are accepted, and what their claims mean.

use std::num::NonZeroU32;

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use serde_json::json;

use super::*;

const ISSUER: &str = "https://issuer.example";
/// A time that has passed, in seconds since 1970.
const PAST: u64 = 1_000_000_000;
/// The year 2100.
const FUTURE: u64 = 4_102_444_800;
/// The modulus of a key that signed [`RS256`] and [`PS256`]; nobody has its private part.
const RSA_MODULUS: &str = concat!(
    "sV8mH4XxYOTrhEggwSQDdhlDMzbbHpNzaOUS2qNrHni7Rs9QZeRTAKxphvctDAFK2JR_BqFTrS8H7NUal6tdhUYi",
    "3URvAcHMtujE2Cqtput0eVRxiQxJRe0cwEMEgNk2u6sicPcgsJBXc4nk7_SpO9wsS6GU9LTBDK1PfHgSLqbHNYod",
    "swefcDcNlb8vaZh_16m6LGXURA3XvXAGPVfOZlACMRwCCM3yiOQo8TRVaXt4ENBrmi62TSZFOXixPaUqQHXXO5Bj",
    "6WXBBErfJTxBgAHDEiB2u1sUZKvLXpnEZXjSklaW3XZbzhGW9L3O2ad--_nsad_qX_7e2YTFTxj1rQ",
);
/// A token of alice, valid until the year 2100.
const RS256: &str = concat!(
    "eyJhbGciOiJSUzI1NiIsImtpZCI6InJzYSJ9.eyJpc3MiOiJodHRwczovL2lzc3Vlci5leGFtcGxlIiwiYXVkIjo",
    "iYmVydGgiLCJzdWIiOiJhbGljZSIsImV4cCI6NDEwMjQ0NDgwMH0.WQjXL-P55VKUvR-Hohq5q0_Hr4DukixhTAr",
    "bDSi9De4kd00z-TFUSbz5gVd7k6a6LN2mxdCKVuSfM_XPlXXwQ9z2sctvdVDnW_kmZcQ7ldG7LNwg7N9lQOF_fPu",
    "B5mPVJTPw7owNZejabVhAsXi9lxUkJxBx50y9Q5_UH_m3VsueMc6S3UTU3h0vhUsMwbBdqTc51UyXRtbhO_4PjY0",
    "c7IhalP_W4TKbpj4UXAgat_EjdyvfVZR-uhNjWaYEjzZJVmjS0rkmuHVuC-Cp0QbFKhq2Y_xzSmYGtOyn5b81D4K",
    "PPQYtN3JL7ufjr4H4f08dvzlk2GED3U3Cgq32IXQtHg",
);
/// The same with another padding.
const PS256: &str = concat!(
    "eyJhbGciOiJQUzI1NiIsImtpZCI6InJzYSJ9.eyJpc3MiOiJodHRwczovL2lzc3Vlci5leGFtcGxlIiwiYXVkIjo",
    "iYmVydGgiLCJzdWIiOiJhbGljZSIsImV4cCI6NDEwMjQ0NDgwMH0.EM6wZK9I4_X-PVsgdtal6qY04X4ncZgjOLN",
    "Mh-JvR7rtPWv2kCBNmJJbeQgJ_FM5XDcfCPgIu7BQgcF7Dq1PwFmDDhM_fRsaS8IoVkXWeinxvjL8wrVGrde-1bR",
    "Kw8-edgBK6tUkoQKf_qIx2WiXDLHymi_9vmjb3rPr9H-9fexT8lRVwSiERBSYDA-Unvlzv3vRrZbYxXOyfFdsD3D",
    "VP9FKCW2hGP3gBbFXi9ywv2xSkK6pjL061EXI2y-KaLHc3XaUZUyhrTGXc7Djx9e-YeU3soDfoWePuUSpWQm0z5a",
    "lB1lj9YVQScH8uksmHQgJRx2FozoI6-MHYGp9S9NojQ",
);

/// Returns the test's signing key of this number.
fn pair(number: u8) -> Ed25519KeyPair {
    Ed25519KeyPair::from_seed_unchecked(&[number; 32]).unwrap()
}

fn jwk(number: u8) -> Value {
    let x = URL_SAFE_NO_PAD.encode(pair(number).public_key());
    json!({"kty": "OKP", "crv": "Ed25519", "kid": format!("k{number}"), "x": x})
}

fn jwks(keys: &[Value]) -> Jwks {
    Jwks::parse(json!({ "keys": keys }).to_string().as_bytes()).unwrap()
}

fn sign_with(header: &Value, claims: &Value, key: &Ed25519KeyPair) -> String {
    let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let message = format!("{}.{}", part(header), part(claims));
    let signature = URL_SAFE_NO_PAD.encode(key.sign(message.as_bytes()));
    format!("{message}.{signature}")
}

/// Signs claims with key 1.
fn sign(claims: &Value) -> String {
    sign_with(&json!({"alg": "EdDSA", "kid": "k1"}), claims, &pair(1))
}

/// Returns good claims of alice, changed by `change`.
fn claims(change: impl FnOnce(&mut Value)) -> Value {
    let mut claims = json!({"iss": ISSUER, "aud": "berth", "sub": "alice", "exp": FUTURE});
    change(&mut claims);
    claims
}

fn settings() -> JwtTable {
    JwtTable {
        issuer: ISSUER.to_owned(),
        audience: "berth".to_owned(),
        jwks: "/jwks.json".to_owned(),
        ..JwtTable::default()
    }
}

fn check_with(settings: JwtTable, token: &str) -> Result<Caller, Error> {
    let rsa = json!({"kty": "RSA", "kid": "rsa", "n": RSA_MODULUS, "e": "AQAB"});
    let keys = jwks(&[jwk(1), jwk(2), rsa]);
    TokenChecker::new(settings).check(token.as_bytes(), &keys)
}

fn check(token: &str) -> Result<Caller, Error> {
    check_with(settings(), token)
}

#[test]
fn a_good_token_names_its_client() {
    let caller = check(&sign(&claims(|_| {}))).unwrap();
    assert_eq!((&*caller.principal, caller.is_admin), ("jwt:alice", false));
    assert_eq!(*caller.limits, KeyLimits::default());
    let several = claims(|claims| claims["aud"] = json!(["other", "berth"]));
    assert!(check(&sign(&several)).is_ok());
}

#[test]
fn tokens_of_others_and_of_other_times_are_refused() {
    let refused = |change: &dyn Fn(&mut Value)| check(&sign(&claims(change))).unwrap_err();
    let remove =
        |name: &'static str| refused(&|claims| drop(claims.as_object_mut().unwrap().remove(name)));
    assert_eq!(refused(&|claims| claims["exp"] = PAST.into()), Error::Expired);
    assert_eq!(refused(&|claims| claims["nbf"] = FUTURE.into()), Error::NotYetValid);
    assert_eq!(refused(&|claims| claims["iss"] = "https://evil.example".into()), Error::Foreign);
    assert_eq!(refused(&|claims| claims["aud"] = "other".into()), Error::Foreign);
    for name in ["exp", "iss", "aud", "sub"] {
        assert_eq!(remove(name), Error::Claim(name.to_owned()));
    }
}

#[test]
fn only_the_named_key_signs_and_only_by_accepted_algorithms() {
    let good = claims(|_| {});
    let header = |kid: &str| json!({"alg": "EdDSA", "kid": kid});
    assert!(check(&sign_with(&header("k2"), &good, &pair(2))).is_ok());
    assert_eq!(check(&sign_with(&header("k2"), &good, &pair(1))), Err(Error::Signature));
    assert_eq!(check(&sign_with(&header("k9"), &good, &pair(1))), Err(Error::UnknownKey));
    let nameless = sign_with(&json!({"alg": "EdDSA"}), &good, &pair(1));
    assert_eq!(check(&nameless), Err(Error::UnknownKey), "it isn't clear which key");
    let checker = TokenChecker::new(settings());
    assert!(checker.check(nameless.as_bytes(), &jwks(&[jwk(1)])).is_ok());
    // The algorithm is the settings' and the key's choice, never the token's.
    for algorithm in ["HS256", "RS256", "ES256"] {
        let header = json!({"alg": algorithm, "kid": "k1"});
        let refused = check(&sign_with(&header, &good, &pair(1)));
        assert_eq!(refused, Err(Error::Algorithm), "{algorithm}");
    }
    let none = sign_with(&json!({"alg": "none", "kid": "k1"}), &good, &pair(1));
    assert_eq!(check(&none), Err(Error::Malformed));
    let only_rsa = JwtTable { algorithms: vec![JwtAlgorithm::RS256], ..settings() };
    assert_eq!(check_with(only_rsa, &sign(&good)), Err(Error::Algorithm));
    let mut for_encryption = jwk(1);
    for_encryption["use"] = "enc".into();
    assert!(Jwks::parse(json!({"keys": [for_encryption]}).to_string().as_bytes()).is_err());
    let critical = json!({"alg": "EdDSA", "kid": "k1", "crit": ["x"], "x": 1});
    assert_eq!(check(&sign_with(&critical, &good, &pair(1))), Err(Error::Malformed));
}

#[test]
fn a_changed_token_is_refused() {
    let token = sign(&claims(|_| {}));
    let [header, body, signature] = token.split('.').collect::<Vec<_>>()[..] else { panic!() };
    let other = URL_SAFE_NO_PAD.encode(claims(|claims| claims["sub"] = "bob".into()).to_string());
    assert_eq!(check(&format!("{header}.{other}.{signature}")), Err(Error::Signature));
    assert_eq!(check(&format!("{header}.{body}.")), Err(Error::Signature));
    for malformed in ["", "..", "a.b.c", &format!("{header}.{body}")] {
        assert_eq!(check(malformed), Err(Error::Malformed), "{malformed:?}");
    }
}

#[test]
fn rsa_tokens_are_checked_by_the_algorithm_that_signed_them() {
    let both =
        || JwtTable { algorithms: vec![JwtAlgorithm::RS256, JwtAlgorithm::PS256], ..settings() };
    for token in [RS256, PS256] {
        assert_eq!(&*check_with(both(), token).unwrap().principal, "jwt:alice");
        let (message, signature) = token.rsplit_once('.').unwrap();
        let mut bytes = URL_SAFE_NO_PAD.decode(signature).unwrap();
        bytes[7] ^= 1;
        let wrong = format!("{message}.{}", URL_SAFE_NO_PAD.encode(bytes));
        assert_eq!(check_with(both(), &wrong), Err(Error::Signature));
    }
    assert_eq!(check(PS256), Err(Error::Algorithm), "it is not among the defaults");
}

#[test]
fn claims_become_names_rights_and_limits() {
    let settings = || JwtTable {
        principal_claim: "client_id".to_owned(),
        limits_claim: "berth_limits".to_owned(),
        admin_claim: "/realm/roles".to_owned(),
        admin_value: "berth-admin".to_owned(),
        ..settings()
    };
    let caller = |change: &dyn Fn(&mut Value)| {
        let good = claims(|claims| {
            claims["client_id"] = "team".into();
            change(claims);
        });
        check_with(settings(), &sign(&good))
    };
    assert_eq!(&*caller(&|_| {}).unwrap().principal, "jwt:team");
    let limits = json!({"requests_per_minute": 5, "priority": {"class": "low"}});
    let limited = caller(&|claims| claims["berth_limits"] = limits.clone()).unwrap();
    assert_eq!(limited.limits.requests_per_minute, NonZeroU32::new(5));
    for roles in [json!("berth-admin"), json!(["user", "berth-admin"])] {
        assert!(caller(&|claims| claims["realm"] = json!({"roles": roles})).unwrap().is_admin);
    }
    for roles in [json!("berth-admins"), json!(["user"]), json!(true), json!([["berth-admin"]])] {
        assert!(!caller(&|claims| claims["realm"] = json!({"roles": roles})).unwrap().is_admin);
    }
    for limits in [json!({"requests_per_minute": 0}), json!({"request_per_minute": 1}), json!(7)] {
        let refused = caller(&|claims| claims["berth_limits"] = limits.clone());
        assert_eq!(refused, Err(Error::Claim("berth_limits".to_owned())), "no limits at all");
    }
    for name in [json!(""), json!("a\nb"), json!("x".repeat(125)), json!({}), json!(null)] {
        let refused = caller(&|claims| claims["client_id"] = name.clone());
        assert_eq!(refused, Err(Error::Claim("client_id".to_owned())), "{name}");
    }
}

#[test]
fn a_claim_without_a_name_gives_no_right() {
    let unset = JwtTable { limits_claim: "berth_limits".to_owned(), ..settings() };
    let token = sign(&claims(|claims| claims[""] = json!([""])));
    let caller = check_with(unset, &token).unwrap();
    assert!(!caller.is_admin, "no claim for admins is set");
    let token = sign(&claims(|claims| claims[""] = json!({"requests_per_minute": 5})));
    let caller = check_with(settings(), &token).unwrap();
    assert_eq!(caller.limits.requests_per_minute, None, "no claim for limits is set");
    let token = sign(&claims(|claims| claims[""] = json!("")));
    assert!(!check_with(settings(), &token).unwrap().is_admin);
}

#[test]
fn keys_that_can_not_be_used_are_left_out() {
    let secret = json!({"kty": "oct", "kid": "s", "k": "c2VjcmV0"});
    let unknown = json!({"kty": "new", "kid": "n"});
    let keys = jwks(&[secret.clone(), unknown, jwk(1)]);
    assert_eq!(keys.keys.len(), 1);
    for bad in ["", "{}", "[]", r#"{"keys":[]}"#, &json!({"keys": [secret]}).to_string()] {
        assert!(Jwks::parse(bad.as_bytes()).is_err(), "{bad} was taken");
    }
    let many = vec![jwk(1); KEYS_MAX + 1];
    assert!(Jwks::parse(json!({ "keys": many }).to_string().as_bytes()).is_err());
}
