// Gives the job's token to whoever logs in by OAUTHBEARER, in every release that has it.

import java.util.Base64;
import java.util.List;
import java.util.Map;
import java.util.Set;
import javax.security.auth.callback.Callback;
import javax.security.auth.login.AppConfigurationEntry;
import org.apache.kafka.common.security.auth.AuthenticateCallbackHandler;
import org.apache.kafka.common.security.auth.SaslExtensionsCallback;
import org.apache.kafka.common.security.oauthbearer.OAuthBearerToken;
import org.apache.kafka.common.security.oauthbearer.OAuthBearerTokenCallback;

public class TokenHandler implements AuthenticateCallbackHandler {
  @Override
  public void configure(Map<String, ?> configs, String mechanism, List<AppConfigurationEntry> entries) {}

  @Override
  public void close() {}

  @Override
  public void handle(Callback[] callbacks) {
    for (Callback callback : callbacks) {
      if (callback instanceof OAuthBearerTokenCallback) {
        ((OAuthBearerTokenCallback) callback).token(new Token());
      } else if (!(callback instanceof SaslExtensionsCallback)) {
        throw new IllegalStateException("asked for " + callback);
      }
    }
  }

  static class Token implements OAuthBearerToken {
    @Override
    public String value() {
      return Driver.job.get("security").get("token").asText();
    }

    @Override
    public Set<String> scope() {
      return Set.of();
    }

    @Override
    public long lifetimeMs() {
      return System.currentTimeMillis() + 3_600_000;
    }

    @Override
    public String principalName() {
      return Driver.job.get("security").get("user").asText();
    }

    @Override
    public Long startTimeMs() {
      return System.currentTimeMillis();
    }
  }
}
