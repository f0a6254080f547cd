import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutionException;
import org.apache.kafka.clients.admin.Admin;

/** The state of a group, how many members it has and its coordinator, by an admin client that stays: see Tools.java. */
public class State {
    static Admin admin;

    public static void main(String[] arguments) throws Exception {
        if (admin == null) {
            admin = Admin.create(Map.of("bootstrap.servers", arguments[1], "default.api.timeout.ms", "5000", "request.timeout.ms", "4000"));
        }
        String group = arguments[2];
        List<String> one = List.of(group);
        String kind = arguments.length > 3 ? arguments[3] : "consumer";
        try {
            System.out.print(switch (kind) {
                case "classic" -> { // of any kind of members
                    var found = admin.describeClassicGroups(one).all().get().get(group);
                    yield found.state() + " " + found.members().size() + " " + found.coordinator().id();
                }
                case "streams" -> {
                    var found = admin.describeStreamsGroups(one).all().get().get(group);
                    yield found.groupState() + " " + found.members().size() + " " + found.coordinator().id();
                }
                case "share" -> {
                    var found = admin.describeShareGroups(one).all().get().get(group);
                    yield found.groupState() + " " + found.members().size() + " " + found.coordinator().id();
                }
                default -> {
                    var found = admin.describeConsumerGroups(one).all().get().get(group);
                    yield found.groupState() + " " + found.members().size() + " " + found.coordinator().id();
                }
            });
        } catch (ExecutionException fault) {
            System.out.print("UNKNOWN 0 -1");
        }
    }
}
